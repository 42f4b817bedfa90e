"""Which rewards are equal: one rule, for every target and for everything that is said about a group.

In sorted order, neighbours that differ by no more than ``TOLERANCE`` times the group's largest magnitude are tied,
and so is a run of such neighbours, however long. Rewards are mostly sums in float32: two that should be equal may
differ by a few units in the last place, and an order made of that would be noise at full strength. What cancels
inside a sum (1 - 1 + 0.1) leaves rounding of the terms, of which the group knows nothing: round such rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

TOLERANCE = 4 * torch.finfo(torch.float32).eps
"""4.8e-7, a few roundings of float32, as a share of the largest magnitude in the group."""


def merge_ties(values: Tensor, mask: Tensor) -> Tensor:
    """``[groups, K]`` float64 values in which every run of ties has one value, the middle of the run.

    Values without a tie are unchanged; the order of the candidates does not matter. O(K log K).

    >>> merge_ties(torch.tensor([[0.3, 1.0, 0.1 + 0.2]], dtype=torch.float64), torch.tensor([[True, True, True]]))
    tensor([[0.3000, 1.0000, 0.3000]], dtype=torch.float64)
    """
    keys, order = torch.where(mask, values, torch.inf).sort(-1)
    largest = torch.where(mask, values.abs(), 0.0).amax(-1, keepdim=True)
    apart = keys[:, 1:] - keys[:, :-1] > TOLERANCE * largest
    edge = torch.ones_like(mask[:, :1])
    place = torch.arange(values.shape[1], device=values.device).expand_as(order)
    start = torch.where(torch.cat([edge, apart], -1), place, 0).cummax(-1).values
    last = torch.where(torch.cat([apart, edge], -1), place, values.shape[1])
    low, high = keys.gather(-1, start), keys.gather(-1, last.flip(-1).cummin(-1).values.flip(-1))
    middle = torch.where(low == high, low, low + (high - low) / 2)
    return torch.where(mask, torch.empty_like(middle).scatter(-1, order, middle), values)


def all_tied(values: Sequence[float]) -> bool:
    """Whether a list of rewards prefers nothing, by the same rule."""
    tolerance = TOLERANCE * max(map(abs, values))
    return all(high - low <= tolerance for low, high in pairwise(sorted(values)))
