"""The equation: ``loss = D(Q, softmax((logp - anchor_logp) / tau))`` over groups of candidates.

Whatever produced the log-probabilities sees the loss only through ``c = dloss/dlogp``, one number per
candidate. `Objective.coefficients` returns that table: back-propagating ``sum c * logp`` in pieces of any
size and order gives the gradient of the whole-group loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from adpo.core.divergences import Divergence, cross_entropy, entropy
from adpo.core.groups import Evidence, enter, result_dtype, tau_column, transformed
from adpo.core.signals import Signals, by_name
from adpo.core.targets import Target

Reduction = Literal["mean", "sum", "none"]

LIVE = 1e-12
"""A group is live when some ``|tau * c|`` exceeds this: float64 rounding stays below, signal above."""

SATURATED = 0.99
"""A group is saturated when one candidate holds more than this share of the anchored policy."""


class Diagnostics(NamedTuple):
    """Means over the groups with at least one real candidate; 0-dimensional tensors."""

    anchor_kl: Tensor  # KL(policy || anchor), both renormalised over the candidates of the group
    log_ratio: Tensor  # mean of logp - anchor_logp: falls when the whole group loses mass
    target_entropy: Tensor  # entropy of q in nats, mean over the stages of the groups that have any
    policy_entropy: Tensor  # entropy of softmax(u) in nats
    saturated: Tensor  # share of groups with max softmax(u) > 0.99 (one candidate alone is not)
    live: Tensor  # share of groups with a non-zero coefficient


def anchored_logits(logp: Tensor, anchor_logp: Tensor | None, tau: float | Tensor) -> Tensor:
    """``u = (logp - anchor_logp) / tau``, ``[groups, K]``; the anchor is a constant, None is the zero anchor.

    >>> anchored_logits(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]]), 0.5).tolist()
    [[1.0, -1.0]]
    """
    if logp.ndim != 2:
        raise ValueError(f"logp must be [groups, K]; got {list(logp.shape)}")
    anchor = torch.zeros_like(logp) if anchor_logp is None else anchor_logp.detach()
    column = tau_column(tau, len(logp), logp.device)
    u = (logp.to(torch.float64) - anchor.to(torch.float64)) / column
    return u.to(result_dtype(logp))


@dataclass(frozen=True)
class Objective:
    """A target, a divergence and a temperature, chosen independently.

    >>> import adpo
    >>> objective = adpo.Objective(adpo.boltzmann(beta=0.5), tau=0.8)
    >>> logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    >>> objective.coefficients(logp, logp, rewards=torch.tensor([[1.0, 0.0, 0.0]])).round(decimals=3)
    tensor([[-0.5670,  0.2840,  0.2840]])

    Every method takes ``logp`` (``[groups, K]``), ``anchor_logp`` (the same, or None for the zero anchor), and
    by keyword ``mask`` (true = real candidate), ``tau`` (a number or ``[groups]``, instead of the objective's
    own) and the signals that the target reads. Tables are computed in float64; results are float32, or
    float64 for float64 ``logp``.
    """

    target: Target
    divergence: Divergence = cross_entropy
    tau: float = 1.0

    def __post_init__(self) -> None:
        tau_column(self.tau, 1, torch.device("cpu"))
        if self.target.has_zeros and not self.divergence.finite_at_zeros:
            raise ValueError(
                f"{self.divergence} is infinite against {self.target}, which leaves candidates without mass; "
                "give the target label_smoothing > 0, or use cross_entropy"
            )

    def loss(
        self,
        logp: Tensor,
        anchor_logp: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        tau: float | Tensor | None = None,
        reduction: Reduction = "mean",
        **signals: Unpack[Signals],
    ) -> Tensor:
        """The loss, differentiable in ``logp``: mean or sum over the real groups, or ``[groups]``."""
        table, evidence = self._enter(logp, anchor_logp, mask, tau, signals)
        return self._reduced(table, evidence, reduction).to(result_dtype(logp))

    def coefficients(
        self,
        logp: Tensor,
        anchor_logp: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        tau: float | Tensor | None = None,
        reduction: Reduction = "mean",
        **signals: Unpack[Signals],
    ) -> Tensor:
        """``c = dloss/dlogp``, ``[groups, K]``, detached; zero on masked cells, sums to zero in every group."""
        with torch.inference_mode(False), torch.enable_grad():
            table, evidence = self._enter(logp.detach(), anchor_logp, mask, tau, signals)
            return self._slope(table, evidence, reduction).to(result_dtype(logp))

    def diagnostics(
        self,
        logp: Tensor,
        anchor_logp: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        tau: float | Tensor | None = None,
        **signals: Unpack[Signals],
    ) -> Diagnostics:
        """What to watch: the one source of these metrics for every trainer."""
        with torch.inference_mode(False), torch.enable_grad():
            table, evidence = self._enter(logp.detach(), anchor_logp, mask, tau, signals)
            live = self.live(self._slope(table, evidence, "sum"), evidence.tau)
        with torch.no_grad():
            real = evidence.mask.any(-1)
            size = evidence.mask.sum(-1).clamp(min=1)
            log_p = self._log_softmax((table - evidence.anchor_logp) / evidence.tau, evidence)
            log_pi = self._log_softmax(table, evidence)
            log_anchor = self._log_softmax(evidence.anchor_logp, evidence)
            target_entropy, stages = self.target.entropy(evidence)
            largest = torch.where(evidence.mask, log_p, -torch.inf).exp().amax(-1)
            means = Diagnostics(
                anchor_kl=_mean((log_pi.exp() * (log_pi - log_anchor) * evidence.mask).sum(-1), real),
                log_ratio=_mean((table - evidence.anchor_logp).sum(-1) / size, real),
                target_entropy=_mean(target_entropy / stages.clamp(min=1), real & (stages > 0)),
                policy_entropy=_mean(entropy(log_p, evidence.mask), real),
                saturated=_mean(((largest > SATURATED) & (size > 1)).to(torch.float64), real),
                live=_mean(live.to(torch.float64), real),
            )
            poison = evidence.poison().sum()  # NaN or nothing
            return Diagnostics(*((value + poison).to(result_dtype(logp)) for value in means))

    def live(self, c: Tensor, tau: float | Tensor) -> Tensor:
        """Which groups have any gradient, ``[groups]``, from the coefficients of the summed loss.

        Rounding does not count, except where the loss has a scale of its own (transport); NaN does.
        """
        column = tau.to(c).reshape(-1, 1) if isinstance(tau, Tensor) else tau
        noise = 0.0 if self.divergence.needs_positions else LIVE
        return ~((c * column).abs() <= noise).all(-1)

    def _enter(
        self,
        logp: Tensor,
        anchor_logp: Tensor | None,
        mask: Tensor | None,
        tau: float | Tensor | None,
        signals: Signals,
    ) -> tuple[Tensor, Evidence]:
        return enter(logp, anchor_logp, mask, self.tau if tau is None else tau, by_name(signals))

    def _reduced(self, table: Tensor, evidence: Evidence, reduction: Reduction) -> Tensor:
        u = (table - evidence.anchor_logp) / evidence.tau
        evidence = replace(evidence, faults=[*evidence.faults])
        groups = self.target.compare(self.divergence, u, evidence, self._positions(evidence))
        if evidence.faults:  # bad input that could not be refused: NaN, also in the slope of its groups
            groups = groups + evidence.poison() * u.sum(-1)
        if reduction == "mean":
            return groups.sum() / evidence.mask.any(-1).sum().clamp(min=1)
        if reduction == "sum":
            return groups.sum()
        if reduction == "none":
            return groups
        raise ValueError(f'reduction must be "mean", "sum" or "none"; got {reduction!r}')

    def _slope(self, table: Tensor, evidence: Evidence, reduction: Reduction) -> Tensor:
        if transformed():
            of_table = torch.func.grad(lambda each: self._reduced(each, evidence, reduction).sum())
            return of_table(table.detach()).detach()  # type: ignore[no-any-return]
        leaf = table.detach().requires_grad_()
        loss = self._reduced(leaf, evidence, reduction).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
        return slope

    def _positions(self, evidence: Evidence) -> Tensor | None:
        if not self.divergence.needs_positions:
            return None
        if "positions" in evidence.signals:
            return evidence.signals["positions"]
        _, signal = evidence.need(str(self.divergence), "rewards", "ranks", "positions")
        return signal  # a distance does not mind that better ranks are smaller

    @staticmethod
    def _log_softmax(table: Tensor, evidence: Evidence) -> Tensor:
        """Over the real candidates; masked cells and padding groups are 0."""
        inside = evidence.mask | ~evidence.mask.any(-1, keepdim=True)
        log_p = torch.log_softmax(torch.where(inside, table, -torch.inf), -1)
        return torch.where(evidence.mask, log_p, 0.0)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, values, 0.0).sum() / counted.sum().clamp(min=1)
