"""Plackett-Luce: a ranking as a race for the first place, then for the second, and so on.

Candidates with equal reward form a stratum. With strata ``D_1 > D_2 > ...`` and the risk set
``R_j = D_j + D_{j+1} + ...`` (everyone not yet placed), stratum j has ``d = |D_j|`` stages, l = 0 ... d - 1:

    q = uniform over D_j      against      softmax(u + log w) over R_j
    w_i = 1 - l/d  on D_j,  1 elsewhere    (Efron)
    w_i = 1        everywhere              (Breslow)

as Cox regression treats ties. The lowest stratum beats nobody and has no stage, so a tied group is silent.
Without ties the cross-entropy is the negative log-likelihood of the ranking (ListMLE); with ties it exceeds
Efron's partial likelihood by the constant ``sum log(d^d / d!)`` that the weights bring in.

Cross-entropy (and forward KL, which differs by the entropy of the target) has a closed form of O(K log K) time and
O(K) memory a group; other divergences go stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adpo.core.groups import Groups
from adpo.core.stages import SmoothedTarget, Stage, best_first
from adpo.core.tails import log_tail
from adpo.core.ties import runs


class Strata(NamedTuple):
    """The order of each group, best first, masked candidates before all others; every table ``[groups, K]``.

    At sorted place s stands candidate ``order[s]``; its stratum takes the places ``start[s] ... end[s] - 1``.
    """

    order: Tensor
    start: Tensor
    end: Tensor
    staged: Tensor  # place s carries a stage: a real candidate, and not of the lowest stratum

    @property
    def size(self) -> Tensor:
        """d, the size of the stratum at each place."""
        return (self.end - self.start).to(torch.float64)

    @property
    def at_risk(self) -> Tensor:
        """``|R_j|``: masked candidates stand in front, so all places from ``start`` on are real."""
        return (self.start.shape[1] - self.start).to(torch.float64)

    def place_inside(self) -> Tensor:
        """l, the number of the stage inside its stratum: 0 ... d - 1."""
        place = torch.arange(self.start.shape[1], device=self.start.device)
        return (place - self.start).to(torch.float64)


def strata(scores: Tensor, mask: Tensor) -> Strata:
    """Sort each group by descending score, ``[groups, K]``, and find the runs of equal scores.

    >>> scores = torch.tensor([[0.0, 2.0, 2.0]])
    >>> ranked = strata(scores, scores >= 0)
    >>> ranked.order.tolist(), ranked.start.tolist(), ranked.end.tolist(), ranked.staged.tolist()
    ([[1, 2, 0]], [[0, 0, 2]], [[2, 2, 3]], [[True, True, False]])
    """
    keys, order = torch.where(mask, scores, torch.inf).sort(dim=-1, descending=True, stable=True)
    start, last = runs(keys[:, 1:] != keys[:, :-1])
    return Strata(order, start, last + 1, mask.gather(-1, order) & (last + 1 < scores.shape[1]))


@dataclass(frozen=True)
class plackett_luce(SmoothedTarget):
    """The whole ranking: signal ``rewards``, or ``ranks`` (1 = best, equal = tie).

    >>> import adpo
    >>> ranks = torch.tensor([[1, 2, 3, 4]])
    >>> adpo.Objective(plackett_luce()).loss(torch.zeros(1, 4), ranks=ranks).exp().round().item()  # 4!
    24.0
    """

    ties: Literal["efron", "breslow"] = "efron"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ties not in ("efron", "breslow"):
            raise ValueError(f'ties must be "efron" or "breslow"; got {self.ties!r}')

    def stages(self, groups: Groups) -> Iterator[Stage]:
        """Stage s of a group belongs to the candidate at its s-th place; at most K - 1 are not silent."""
        ranked = _ranked(groups)
        # Each candidate's stratum, by candidate instead of by place.
        stratum = torch.empty_like(ranked.start).scatter(-1, ranked.order, ranked.start)
        log_shrink = self._log_shrink(ranked)
        for place in range(stratum.shape[1] - 1):
            start = ranked.start[:, place : place + 1]
            winners = stratum == start
            at_risk = (stratum >= start) & ranked.staged[:, place : place + 1]
            stage = self.smoothed(winners / winners.sum(-1, keepdim=True).to(torch.float64), at_risk)
            shrink = torch.where(winners, log_shrink[:, place : place + 1], 0.0)
            yield Stage(stage.log_q, stage.log_weight + shrink)

    def entropy(self, groups: Groups) -> tuple[Tensor, Tensor]:
        ranked = _ranked(groups)
        smoothing, size, at_risk = self.label_smoothing, ranked.size, ranked.at_risk
        lost = smoothing / at_risk
        won = (1 - smoothing) / size + lost
        per_stage = -size * torch.xlogy(won, won) - (at_risk - size) * torch.xlogy(lost, lost)
        return torch.where(ranked.staged, per_stage, 0.0).sum(-1), ranked.staged.sum(-1)

    def _log_shrink(self, ranked: Strata) -> Tensor:
        """log w on D_j of the stage at each place."""
        if self.ties == "breslow":
            return torch.zeros_like(ranked.start, dtype=torch.float64)
        return torch.log1p(-ranked.place_inside() / ranked.size)

    def cross_entropy(self, u: Tensor, groups: Groups) -> Tensor:
        """All stages at once, ``[groups]``, in the order of the places.

        A stage costs ``log_z - (mean of u + log w over q)``. Sums over risk sets are sums from the end of the
        row; masked candidates stand in front, where no risk set reaches.
        """
        ranked = _ranked(groups)
        sorted_u = u.gather(-1, ranked.order)
        log_rest = log_tail(sorted_u)
        log_shrink = self._log_shrink(ranked)
        if self.ties == "breslow":
            log_z = log_rest.gather(-1, ranked.start)
        else:
            # Adding what is left of D_j to R_{j+1} instead of taking away from R_j: nothing cancels.
            below = log_rest.gather(-1, ranked.end.clamp(max=u.shape[1] - 1))
            # Not logaddexp, whose second derivative overflows where the two are far apart.
            left = log_shrink + _log_sum_of_stratum(sorted_u, ranked)
            log_z = torch.stack([below, left]).logsumexp(0)
        smoothing = self.label_smoothing
        # The d stages of a stratum share the mean of u over it: give each place its own u instead.
        expected = (1 - smoothing) * (sorted_u + log_shrink)
        if smoothing:
            tail = sorted_u.flip(-1).cumsum(-1).flip(-1).gather(-1, ranked.start)
            expected = expected + smoothing * (tail + ranked.size * log_shrink) / ranked.at_risk
        return torch.where(ranked.staged, log_z - expected, 0.0).sum(-1)


def _ranked(groups: Groups) -> Strata:
    return strata(best_first(groups, "plackett_luce()"), groups.mask)


def _log_sum_of_stratum(sorted_u: Tensor, ranked: Strata) -> Tensor:
    """``log sum exp(u)`` over each place's own stratum."""
    peak = torch.full_like(sorted_u, -torch.inf).scatter_reduce(
        -1, ranked.start, sorted_u.detach(), "amax", include_self=False
    )
    peak = peak.gather(-1, ranked.start)
    total = torch.zeros_like(sorted_u).scatter_add(-1, ranked.start, (sorted_u - peak).exp())
    return total.gather(-1, ranked.start).log() + peak
