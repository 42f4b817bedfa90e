"""Plackett-Luce: a ranking as a race for the first place, then for the second, and so on.

Candidates with equal reward form a stratum. With strata ``D_1 > D_2 > ...`` and the risk set
``R_j = D_j + D_{j+1} + ...`` (everyone not yet placed), stratum j has ``d = |D_j|`` stages, l = 0 ... d - 1:

    q = uniform over D_j      against      softmax(u + log w) over R_j
    w_i = 1 - l/d  on D_j,  1 elsewhere    (Efron)
    w_i = 1        everywhere              (Breslow)

as Cox regression treats ties. The lowest stratum beats nobody and has no stage, so a tied group is silent.
Without ties the cross-entropy is the negative log-likelihood of the ranking (ListMLE); with ties it exceeds
Efron's partial likelihood by the constant ``sum log(d^d / d!)`` that the weights bring in.

For cross-entropy and forward KL a closed form takes O(K log K) time and O(K) memory a group; other divergences
go stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adpo.core.divergences import Divergence, cross_entropy, forward_kl
from adpo.core.groups import Evidence
from adpo.core.tails import log_tail
from adpo.core.targets import Stage, _SmoothedTarget, ordering


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

    def turn(self) -> Tensor:
        """l, the number of the stage inside its stratum."""
        place = torch.arange(self.start.shape[1], device=self.start.device)
        return (place - self.start).to(torch.float64)


def strata(scores: Tensor, mask: Tensor) -> Strata:
    """Sort each group by descending score and find the runs of equal scores."""
    width = scores.shape[1]
    keys, order = torch.where(mask, scores, torch.inf).sort(dim=-1, descending=True, stable=True)
    place = torch.arange(width, device=scores.device).expand_as(order)
    differs = keys[:, 1:] != keys[:, :-1]
    edge = torch.ones_like(mask[:, :1])
    start = torch.where(torch.cat([edge, differs], -1), place, 0).cummax(-1).values
    last = torch.where(torch.cat([differs, edge], -1), place, width)
    end = last.flip(-1).cummin(-1).values.flip(-1) + 1
    return Strata(order, start, end, mask.gather(-1, order) & (end < width))


@dataclass(frozen=True)
class plackett_luce(_SmoothedTarget):
    """The whole ranking: signal ``rewards``, or ``ranks`` (1 = best, equal = tie)."""

    ties: Literal["efron", "breslow"] = "efron"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ties not in ("efron", "breslow"):
            raise ValueError(f'ties must be "efron" or "breslow"; got {self.ties!r}')

    def stages(self, evidence: Evidence) -> Iterator[Stage]:
        """Stage s of a group belongs to the candidate at its s-th place; at most K - 1 are heard."""
        ranked = strata(ordering(evidence, "plackett_luce()"), evidence.mask)
        # Each candidate's stratum, by candidate instead of by place.
        stratum = torch.empty_like(ranked.start).scatter(-1, ranked.order, ranked.start)
        log_shrink = self._log_shrink(ranked)
        for place in range(stratum.shape[1] - 1):
            start = ranked.start[:, place : place + 1]
            winners = stratum == start
            at_risk = (stratum >= start) & ranked.staged[:, place : place + 1]
            stage = self._stage(winners / winners.sum(-1, keepdim=True).to(torch.float64), at_risk)
            shrink = torch.where(winners, log_shrink[:, place : place + 1], 0.0)
            yield Stage(stage.log_q, stage.log_weight + shrink)

    def compare(self, divergence: Divergence, u: Tensor, evidence: Evidence, positions: Tensor | None) -> Tensor:
        is_cross_entropy = divergence.formula is cross_entropy.formula
        if not (is_cross_entropy or divergence.formula is forward_kl.formula):
            return super().compare(divergence, u, evidence, positions)
        total = self._cross_entropy(u, strata(ordering(evidence, "plackett_luce()"), evidence.mask))
        return total if is_cross_entropy else total - self.entropy(evidence)[0]

    def entropy(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        ranked = strata(ordering(evidence, "plackett_luce()"), evidence.mask)
        smoothing, size, at_risk = self.label_smoothing, ranked.size, ranked.at_risk
        lost = smoothing / at_risk
        won = (1 - smoothing) / size + lost
        per_stage = -size * torch.xlogy(won, won) - (at_risk - size) * torch.xlogy(lost, lost)
        return torch.where(ranked.staged, per_stage, 0.0).sum(-1), ranked.staged.sum(-1)

    def _log_shrink(self, ranked: Strata) -> Tensor:
        """log w on D_j of the stage at each place."""
        if self.ties == "breslow":
            return torch.zeros_like(ranked.start, dtype=torch.float64)
        return torch.log1p(-ranked.turn() / ranked.size)

    def _cross_entropy(self, u: Tensor, ranked: Strata) -> Tensor:
        """All stages at once, in the order of the places.

        A stage costs ``log_z - (mean of u + log w over q)``. Sums over risk sets are sums from the end of the
        row; masked candidates stand in front, where no risk set reaches.
        """
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


def _log_sum_of_stratum(sorted_u: Tensor, ranked: Strata) -> Tensor:
    """``log sum exp(u)`` over each place's own stratum."""
    peak = torch.full_like(sorted_u, -torch.inf).scatter_reduce(
        -1, ranked.start, sorted_u.detach(), "amax", include_self=False
    )
    peak = peak.gather(-1, ranked.start)
    total = torch.zeros_like(sorted_u).scatter_add(-1, ranked.start, (sorted_u - peak).exp())
    return total.gather(-1, ranked.start).log() + peak
