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
    start, last = runs(keys[:, 1:] - keys[:, :-1] > TOLERANCE * largest)
    low, high = keys.gather(-1, start), keys.gather(-1, last)
    middle = torch.where(low == high, low, low + (high - low) / 2)
    return torch.where(mask, torch.empty_like(middle).scatter(-1, order, middle), values)


def runs(apart: Tensor) -> tuple[Tensor, Tensor]:
    """First and last place, ``[groups, K]``, of the run that each place of a sorted row belongs to.

    ``apart[:, i]``, ``[groups, K - 1]``, says that places i and i + 1 belong to different runs.

    >>> runs(torch.tensor([[False, True]]))
    (tensor([[0, 0, 2]]), tensor([[1, 1, 2]]))
    """
    edge = apart.new_ones(len(apart), 1)
    place = torch.arange(apart.shape[1] + 1, device=apart.device)
    start = torch.where(torch.cat([edge, apart], -1), place, 0).cummax(-1).values
    last = torch.where(torch.cat([apart, edge], -1), place, len(place))
    return start, last.flip(-1).cummin(-1).values.flip(-1)


def all_tied(values: Sequence[float]) -> bool:
    """Whether a list of rewards prefers nothing, by the same rule.

    >>> all_tied([0.3, 0.1 + 0.2]), all_tied([0.3, 0.4])
    (True, False)
    """
    tolerance = TOLERANCE * max(map(abs, values))
    return all(high - low <= tolerance for low, high in pairwise(sorted(values)))
