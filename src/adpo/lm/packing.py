"""Sequences without padding: one row of tokens, and a plan of who attends to whom.

Completions of one prompt may share a copy of it: the prompt goes through the model once, and every completion
attends to the prompt and to itself. Positions, log-probabilities and gradients are those of the sequences one by
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from adpo.lm.scoring import Sequences


@dataclass(frozen=True)
class Plan:
    """Stretches of queries, each with its stretch of keys; the last query is aligned with the last key."""

    query_starts: Tensor  # [stretches + 1], int32: where each stretch begins, and the end
    key_starts: Tensor  # [stretches + 1], int32, in the row of gathered keys
    keys: Tensor | None  # [gathered keys]: which tokens they are; None where they are all tokens in their order
    longest_query: int
    longest_key: int

    def to(self, device: torch.device) -> Plan:
        keys = None if self.keys is None else self.keys.to(device)
        starts = self.query_starts.to(device), self.key_starts.to(device)
        return Plan(*starts, keys, self.longest_query, self.longest_key)


class Packed(NamedTuple):
    """All tokens of a batch, and where the completions are in it."""

    input_ids: Tensor  # [tokens]
    position_ids: Tensor  # [tokens]
    plan: Plan
    before: Tensor  # [targets]: the token whose state predicts each token of a completion
    targets: Tensor  # [targets]: that token
    row: Tensor  # [targets]: the completion it belongs to
    rows: int

    def to(self, device: torch.device) -> Packed:
        moved = (value.to(device) if isinstance(value, Tensor | Plan) else value for value in self)
        return Packed(*moved)  # type: ignore[arg-type]


def packed(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], share: bool = True) -> Packed:
    """Prompts with their completions, row by row; neighbours with the same prompt share it, if asked to.

    >>> batch = packed([[5, 6], [5, 6]], [[7], [8, 9]])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3])
    >>> batch.before.tolist(), batch.targets.tolist(), batch.row.tolist()
    ([1, 1, 3], [7, 8, 9], [0, 1, 1])
    """
    ids: list[int] = []
    positions: list[int] = []
    before: list[int] = []
    row_of: list[int] = []
    stretches: list[tuple[int, list[int]]] = []  # queries, keys
    at = -1  # where the prompt at hand begins
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not prompt:
            raise ValueError(f"row {number} has no prompt: the first token of a completion has nothing to follow")
        if not (share and number and prompts[number - 1] == prompt):
            at = len(ids)
            ids += prompt
            positions += range(len(prompt))
            stretches.append((len(prompt), list(range(at, at + len(prompt)))))
        begin = len(ids)
        ids += completion
        positions += range(len(prompt), len(prompt) + len(completion))
        keys = [*range(at, at + len(prompt)), *range(begin, len(ids))]
        if at + len(prompt) == begin and not _shares_on(prompts, number, share):
            stretches[-1] = (len(prompt) + len(completion), keys)  # alone with its prompt: one stretch
        else:
            stretches.append((len(completion), keys))
        before += [at + len(prompt) - 1, *range(begin, len(ids) - 1)][: len(completion)]
        row_of += [number] * len(completion)
    targets = [token for completion in completions for token in completion]
    return Packed(
        torch.tensor(ids),
        torch.tensor(positions),
        _plan(stretches, len(ids)),
        torch.tensor(before),
        torch.tensor(targets),
        torch.tensor(row_of),
        len(prompts),
    )


def repacked(batch: Sequences, share: bool = True) -> Packed:
    """Padded rows without their padding."""
    ids, real, of_completion = batch.input_ids.tolist(), batch.attention_mask.sum(1), batch.completion_mask.sum(1)
    ends = list(zip(ids, (real - of_completion).tolist(), real.tolist(), strict=True))
    prompts, completions = [row[:begin] for row, begin, _ in ends], [row[begin:end] for row, begin, end in ends]
    return packed(prompts, completions, share).to(batch.input_ids.device)


def _shares_on(prompts: Sequence[Sequence[int]], number: int, share: bool) -> bool:
    """Whether the next row will need the prompt of this one."""
    return share and number + 1 < len(prompts) and prompts[number + 1] == prompts[number]


def _plan(stretches: Sequence[tuple[int, list[int]]], tokens: int) -> Plan:
    queries, keys = [count for count, _ in stretches], [len(keys) for _, keys in stretches]
    gathered = [key for _, keys in stretches for key in keys]
    in_order = gathered == list(range(tokens))
    return Plan(
        torch.tensor(list(accumulate(queries, initial=0)), dtype=torch.int32),
        torch.tensor(list(accumulate(keys, initial=0)), dtype=torch.int32),
        None if in_order else torch.tensor(gathered),
        max(queries),
        max(keys),
    )
