"""Which completions a limit of length cut.

vLLM says why each completion ended. Where no sampler says so, a completion that ends with an
end token is whole, and so is one that is shorter than the limit if something else may end it: stop words, or a
rollout function of the user's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

STOPS = {"stop", "stop_strings", "stop_token_ids"}
"""Arguments of sampling that let completions end by something else than an end token."""
STOPPED = "stop"
"""vLLM's finish reason of a completion that ended by itself."""
Key = tuple[tuple[int, ...], tuple[int, ...]]


class RecordedEngine:
    """In front of vLLM's engine: the finish reason of every completion of a rollout, by its prompt and tokens."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.reasons: dict[Key, str | None] = {}

    def generate(self, *arguments: Any, **options: Any) -> Any:
        requests = self._engine.generate(*arguments, **options)
        for request in requests:
            prompt = tuple(request.prompt_token_ids)
            for found in request.outputs:
                self.reasons[prompt, tuple(found.token_ids)] = found.finish_reason
        return requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class Completion:
    """Of one row; ``written`` is true on tokens of the model, false on those of a tool or an environment."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    written: Sequence[int] | None = None
    messages: Any = None  # the completion as text or messages

    @property
    def last_turn(self) -> int:
        """Tokens of the model since a tool or an environment wrote any."""
        if self.written is None:
            return len(self.tokens)
        turn = 0
        while turn < len(self.written) and self.written[-1 - turn]:
            turn += 1
        return turn

    @property
    def tool_turns(self) -> int:
        """How often a tool or an environment answered."""
        mask = [1, *(self.written or ())]
        return sum(before and not after for before, after in itertools.pairwise(mask))

    @property
    def calls_a_tool(self) -> bool:
        """Whether it ends with a call that nobody answered."""
        last = self.messages[-1] if isinstance(self.messages, list) and self.messages else None
        return isinstance(last, dict) and bool(last.get("tool_calls"))


@dataclass(frozen=True)
class Endings:
    """How completions may end."""

    ends: Collection[int]  # end tokens
    limit: float = math.inf  # tokens of a completion
    stop_words: bool = False  # something else than an end token may end it
    own_rollout: bool = False  # a rollout function of the user's wrote it
    tool_calls: float = math.inf  # turns of tools
    reasons: dict[Key, str | None] = field(default_factory=dict)

    def is_cut(self, row: Completion) -> bool:
        """Whether a limit of length ended this completion.

        >>> endings = Endings(ends={1}, limit=3)
        >>> endings.is_cut(Completion([5], [6, 7, 1])), endings.is_cut(Completion([5], [6, 7, 8]))
        (False, True)
        """
        turn = row.last_turn
        if self.own_rollout:
            ended = turn == 0 or row.tokens[-1] in self.ends
            return not ended and len(row.tokens) >= self.limit
        if row.calls_a_tool and row.tool_turns < self.tool_calls:
            return True  # the answer of the tool did not fit
        if turn == 0:
            return len(row.tokens) > 0  # nothing of the model's fitted behind the answer of a tool
        start = len(row.tokens) - turn
        reason = self.reasons.get(((*row.prompt, *row.tokens[:start]), tuple(row.tokens[start:])))
        if reason is not None:
            return reason != STOPPED
        if row.tokens[-1] in self.ends:
            return False
        return not self.stop_words or len(row.tokens) >= self.limit
