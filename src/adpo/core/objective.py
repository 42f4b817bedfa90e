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

from adpo.core.divergences import Divergence, cross_entropy, entropy, log_softmax
from adpo.core.groups import Groups, prepare, result_dtype, tau_column, transformed
from adpo.core.signals import Inputs
from adpo.core.stages import Target

Reduction = Literal["mean", "sum", "none"]

LIVE = 1e-12
"""A group is live when some ``|tau * c|`` exceeds this: float64 rounding stays below, signal above."""

SATURATED = 0.99
"""A group is saturated when one candidate holds more than this share of the anchored policy."""


class Diagnostics(NamedTuple):
    """Means over the groups with at least one real candidate, weighted as the loss; 0-dimensional tensors."""

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
    u = (logp.to(torch.float64) - anchor.to(torch.float64)) / tau_column(tau, len(logp), logp.device)
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
    by keyword (`adpo.core.signals.Inputs`) ``mask`` (true = real candidate), ``tau`` (a number or ``[groups]``,
    instead of the objective's own), the signals that the target reads, and ``weights`` (``[groups]``, at least 0):
    the mean over groups is then ``sum(w * loss) / sum(w)``, so that weight 2 is the group twice, weight 0 is the
    group left out, and without any weight there is no loss. Tables are computed in float64; results are float32,
    or float64 for float64 ``logp``.
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
        reduction: Reduction = "mean",
        **inputs: Unpack[Inputs],
    ) -> Tensor:
        """The loss, differentiable in ``logp``: mean or sum over the real groups, or ``[groups]``.

        ``reduction`` is that of `torch.nn.functional.cross_entropy`: the sum, and each group's loss under "none",
        are multiplied by the weights.

        >>> import adpo
        >>> logp, labels = torch.zeros(2, 2), torch.tensor([0, 1])
        >>> adpo.presets.sft().loss(logp, labels=labels, weights=torch.tensor([3, 0]), reduction="none").exp()
        tensor([8., 1.])
        """
        table, groups = prepare(logp, anchor_logp, self.tau, inputs)
        return self._reduced(table, groups, reduction).to(result_dtype(logp))

    def coefficients(
        self,
        logp: Tensor,
        anchor_logp: Tensor | None = None,
        *,
        reduction: Reduction = "mean",
        **inputs: Unpack[Inputs],
    ) -> Tensor:
        """``c = dloss/dlogp``, ``[groups, K]``, detached; zero on masked cells, sums to zero in every group.

        >>> import adpo
        >>> logp, labels = torch.zeros(2, 2), torch.tensor([0, 1])
        >>> adpo.presets.sft().coefficients(logp, labels=labels, weights=torch.tensor([3, 1]))
        tensor([[-0.3750,  0.3750],
                [ 0.1250, -0.1250]])
        """
        with torch.inference_mode(False), torch.enable_grad():
            table, groups = prepare(logp.detach(), anchor_logp, self.tau, inputs)
            return self._slope(table, groups, reduction).to(result_dtype(logp))

    def diagnostics(
        self, logp: Tensor, anchor_logp: Tensor | None = None, **inputs: Unpack[Inputs]
    ) -> Diagnostics:
        """What to log: the one source of these metrics for every trainer.

        >>> import adpo
        >>> logp, rewards = torch.zeros(2, 4), torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        >>> adpo.Objective(adpo.plackett_luce()).diagnostics(logp, rewards=rewards).live  # ties prefer nothing
        tensor(0.5000)
        """
        with torch.inference_mode(False), torch.enable_grad():
            table, groups = prepare(logp.detach(), anchor_logp, self.tau, inputs)
            unweighted = replace(groups, weight=torch.ones_like(groups.weight))
            live = self.live(self._slope(table, unweighted, "sum"), groups.tau)
        with torch.no_grad():
            mask, weight = groups.mask, groups.weight
            size = mask.sum(-1).clamp(min=1)
            moved = table - groups.anchor_logp
            log_p, log_pi, log_anchor = (
                log_softmax(logits, mask) for logits in (moved / groups.tau, table, groups.anchor_logp)
            )
            target_entropy, stages = self.target.entropy(groups)
            largest = torch.where(mask, log_p, -torch.inf).exp().amax(-1)
            means = Diagnostics(
                anchor_kl=_mean((log_pi.exp() * (log_pi - log_anchor) * mask).sum(-1), weight),
                log_ratio=_mean(moved.sum(-1) / size, weight),
                target_entropy=_mean(target_entropy / stages.clamp(min=1), weight * (stages > 0)),
                policy_entropy=_mean(entropy(log_p, mask), weight),
                saturated=_mean(((largest > SATURATED) & (size > 1)).to(torch.float64), weight),
                live=_mean(live.to(torch.float64), weight),
            )
            poison = groups.poison().sum()  # NaN or nothing
            return Diagnostics(*((value + poison).to(result_dtype(logp)) for value in means))

    def live(self, c: Tensor, tau: float | Tensor) -> Tensor:
        """Which groups have any gradient, ``[groups]``, from the coefficients of the summed loss.

        Rounding does not count, except where the loss has a scale of its own (transport); NaN does.
        """
        column = tau.to(c).reshape(-1, 1) if isinstance(tau, Tensor) else tau
        noise = 0.0 if self.divergence.needs_positions else LIVE
        return ~((c * column).abs() <= noise).all(-1)

    def _reduced(self, table: Tensor, groups: Groups, reduction: Reduction) -> Tensor:
        u = (table - groups.anchor_logp) / groups.tau
        groups = replace(groups, faults=[*groups.faults])
        losses = self.target.compare(self.divergence, u, groups, self._positions(groups))
        if groups.faults:  # bad input that could not be refused: NaN, also in the slope of its groups
            losses = losses + groups.poison() * u.sum(-1)
        losses = losses * groups.weight
        if reduction == "mean":
            return losses.sum() / _total(groups.weight)
        if reduction == "sum":
            return losses.sum()
        if reduction == "none":
            return losses
        raise ValueError(f'reduction must be "mean", "sum" or "none"; got {reduction!r}')

    def _slope(self, table: Tensor, groups: Groups, reduction: Reduction) -> Tensor:
        if transformed():
            of_table = torch.func.grad(lambda each: self._reduced(each, groups, reduction).sum())
            return of_table(table.detach()).detach()  # type: ignore[no-any-return]
        leaf = table.detach().requires_grad_()
        return torch.autograd.grad(self._reduced(leaf, groups, reduction).sum(), leaf)[0]

    def _positions(self, groups: Groups) -> Tensor | None:
        if not self.divergence.needs_positions:
            return None
        if "positions" in groups.signals:
            return groups.signals["positions"]
        # A distance does not mind that better ranks are smaller.
        return groups.need(str(self.divergence), "rewards", "ranks", "positions")[1]


def _total(weight: Tensor) -> Tensor:
    """Of all groups; 1 where there is nothing to take a mean over."""
    total = weight.sum()
    return torch.where(total > 0, total, 1.0)


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    return torch.where(weight > 0, values * weight, 0.0).sum() / _total(weight)
