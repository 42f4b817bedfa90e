"""How well scores order a list: pairs in the right order, NDCG, the best one first.

Scores and rewards are flat, ``[rows]``, with the list of each row in ``lists``; a result is a mean over the lists
that have something to say (two different rewards). Scores are rounded (to `DECIMALS`), and tied rows
share what their places are worth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adpo.core.groups import from_flat, to_table
from adpo.core.ties import merge_ties

DECIMALS = 5
"""Of a score; what is beyond is the rounding of sums of log-probabilities."""


class Ranking(NamedTuple):
    """Each ``[lists]``: of the lists with at least two different rewards."""

    accuracy: Tensor  # share of pairs with different rewards that the scores put in the same order; ties are half
    ndcg: Tensor  # gains are the rewards above the list's lowest, discounts 1 / log2(place + 1)
    best_first: Tensor  # whether one of the best has the highest score; of several with that score, the share

    def mean(self) -> dict[str, float]:
        return {name: float(values.mean()) for name, values in self._asdict().items() if len(values)}


def ranking(scores: Tensor, rewards: Tensor, lists: Tensor) -> Ranking:
    """How well the scores order the rewards.

    >>> r = ranking(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0, 0, 0]))
    >>> round(float(r.accuracy), 3), round(float(r.ndcg), 3), float(r.best_first)
    (0.667, 0.95, 1.0)
    """
    s, mask, index = from_flat(scores.double().round(decimals=DECIMALS), lists)
    r = merge_ties(to_table(rewards.double(), index, (mask.shape[0], mask.shape[1])), mask)
    high, low = _extremes(r, mask)
    useful = high > low
    s, r, mask, high, low = s[useful], r[useful], mask[useful], high[useful], low[useful]
    return Ranking(_accuracy(s, r, mask), _ndcg(s, r - low[:, None], mask), _best_first(s, r, mask, high))


def _extremes(r: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return r.masked_fill(~mask, -torch.inf).amax(1), r.masked_fill(~mask, torch.inf).amin(1)


def _accuracy(s: Tensor, r: Tensor, mask: Tensor) -> Tensor:
    better = (r[:, :, None] > r[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    margin = s[:, :, None] - s[:, None, :]
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    return (right * better).sum((1, 2)) / better.sum((1, 2))


def _ndcg(s: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    return _dcg(s, gain, mask) / _dcg(gain, gain, mask)


def _dcg(s: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    """Every row gets the mean discount of the places it shares with those of the same score."""
    place = torch.arange(s.shape[1], device=s.device, dtype=torch.float64)
    up_to = torch.cat([place.new_zeros(1), (1 / torch.log2(place + 2)).cumsum(0)])
    both = mask[:, :, None] & mask[:, None, :]
    ahead = ((s[:, None, :] > s[:, :, None]) & both).sum(2)
    tied = ((s[:, None, :] == s[:, :, None]) & both).sum(2).clamp(min=1)
    return (gain * mask * (up_to[ahead + tied] - up_to[ahead]) / tied).sum(1)


def _best_first(s: Tensor, r: Tensor, mask: Tensor, high: Tensor) -> Tensor:
    first = (s == s.masked_fill(~mask, -torch.inf).amax(1, True)) & mask
    return ((r == high[:, None]) & first).double().sum(1) / first.sum(1)
