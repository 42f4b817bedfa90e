"""Lists as a batch of rows: one row per completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adpo.core.groups import from_flat, to_flat
from adpo.core.ties import merge_ties
from adpo.scoring.sequences import Sequences, sequences

Batch = dict[str, Tensor]
"""``input_ids``, ``attention_mask`` and ``completion_mask`` ``[rows, length]``; ``rewards``, ``lists`` (the list
of each row, counted in the batch), ``index`` (counted in the data) and ``place`` (in its list), all ``[rows]``."""


class Collate:
    """A function of rows of a `PreferenceTable`."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        sizes = [len(row["completion_ids"]) for row in rows]
        prompts = [row["prompt_ids"] for row, size in zip(rows, sizes, strict=True) for _ in range(size)]
        completions = [ids for row in rows for ids in row["completion_ids"]]
        return {
            **sequences(prompts, completions, self.pad)._asdict(),
            "rewards": torch.tensor([r for row in rows for r in row["rewards"]], dtype=torch.float64),
            "lists": torch.arange(len(rows)).repeat_interleave(torch.tensor(sizes)),
            "index": torch.tensor([row["index"] for row in rows]).repeat_interleave(torch.tensor(sizes)),
            "place": torch.tensor([place for size in sizes for place in range(size)]),
        }


def tokens(batch: Batch) -> Sequences:
    return Sequences(batch["input_ids"], batch["attention_mask"], batch["completion_mask"])


def shares(lists: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, summing to one over a list, of its best and of its worst rows; zero where all are tied."""
    table, mask, index = from_flat(rewards.double(), lists)
    rewards = to_flat(merge_ties(table, mask), index)
    count = int(lists.max()) + 1
    base = torch.zeros(count, dtype=rewards.dtype, device=rewards.device)
    high = base.scatter_reduce(0, lists, rewards, "amax", include_self=False)
    low = base.scatter_reduce(0, lists, rewards, "amin", include_self=False)
    found = []
    for extreme in (high, low):
        at = ((rewards == extreme[lists]) & (high > low)[lists]).to(rewards)
        found.append(at / base.index_add(0, lists, at).clamp(min=1)[lists])
    return found[0], found[1]
