"""Groups without gradient: how many there are, why, and what to change when nearly all are.

A group has no gradient when all its coefficients are zero. Where policy and anchor are the same that is a group of
equal rewards; away from the anchor such a group may have a gradient. So whether there is one is looked up in the
coefficients, and the causes, which the rewards tell, are only for the message.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from adpo.core.ties import all_tied

log = logging.getLogger("adpo")
SHARE, STEPS = 0.9, 20
"""A warning is logged when more than this share of groups has had no gradient over so many optimizer steps."""
ADVICE = {
    "cut": "all completions were cut at the length limit of {limit}: raise max_completion_length, or set "
    "truncated: keep to reward them as they are",
    "right": "all completions got reward 1: take harder problems, or a higher sampling temperature",
    "wrong": "all completions got reward 0: take easier problems, more completions a prompt (num_generations), a "
    "better model to start from, or a reward that is graded",
    "equal": "all completions of a prompt got the same reward: take a reward that is graded, more completions a "
    "prompt (num_generations), or a higher sampling temperature",
    "left out": "no completion could be used (no reward, empty, or too long for the model): see the warnings "
    "before",
    "tied": "all completions of a list have the same reward or rank: there is no preference in the data",
}
"""What to change, by the cause."""


def causes_of(rewards: Tensor, member: Tensor, cut: Tensor) -> Counter[str]:
    """Of groups whose members have equal rewards, by cause; all tables ``[groups, K]``.

    >>> import torch
    >>> rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    >>> causes_of(rewards, torch.ones(3, 2).bool(), torch.zeros(3, 2).bool())
    Counter({'right': 1, 'wrong': 1})
    """
    found: Counter[str] = Counter()
    for values, inside, ended in zip(rewards.tolist(), member.tolist(), cut.tolist(), strict=True):
        kept = [value for value, known in zip(values, inside, strict=True) if known]
        if all(ended):
            if not kept or all_tied(kept):
                found["cut"] += 1
        elif not kept:
            found["left out"] += 1
        elif all_tied(kept):
            found[{1.0: "right", 0.0: "wrong"}.get(kept[0], "equal")] += 1
    return found


class GradientMonitor:
    """Observes every rollout and every optimizer step; its state is a part of checkpoints."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.steps = self.steps_with_gradient = 0
        self.causes: Counter[str] = Counter()  # of the whole run
        self._recent: deque[float] = deque(maxlen=STEPS)  # shares of groups without gradient
        self._recent_causes: deque[Counter[str]] = deque(maxlen=STEPS)

    def rollout(self, causes: Mapping[str, int]) -> None:
        """Causes of the groups of a rollout that have equal rewards."""
        self.causes.update(causes)
        self._recent_causes.append(Counter(causes))

    def step(self, without_gradient: float) -> None:
        """The share of groups without gradient in an optimizer step; warns when nearly all are, for long."""
        self.steps += 1
        self.steps_with_gradient += without_gradient < 1
        self._recent.append(without_gradient)
        share = sum(self._recent) / len(self._recent)
        if len(self._recent) == STEPS and share > SHARE:
            log.warning(
                "%.0f %% of groups were without gradient in the last %d steps%s",
                *(100 * share, STEPS, self.advice(sum(self._recent_causes, Counter()))),
            )
            self._recent.clear()

    def advice(self, causes: Counter[str] | None = None) -> str:
        """The commonest cause and what to change, as the end of a sentence; nothing where none is known."""
        known = self.causes if causes is None else causes
        if not known:
            return ""
        cause, count = known.most_common(1)[0]
        return f"; {100 * count / known.total():.0f} % of them because {ADVICE[cause].format(limit=self.limit)}"

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "with_gradient": self.steps_with_gradient, "causes": dict(self.causes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.steps_with_gradient = state["steps"], state["with_gradient"]
        self.causes = Counter(state["causes"])
