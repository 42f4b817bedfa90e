"""Targets Q: what the anchored policy should look like over the candidates of a group.

A target is a stack of stages ``(log_q, log_weight)``, each compared with ``softmax(u + log_weight)``: weight
-inf takes a candidate out of the support, a row of -inf makes the stage silent for that group. Every target
here has one stage; Plackett-Luce, in `ranking`, has up to K - 1.

`label_smoothing` mixes each stage with the uniform distribution over its support.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from adpo.core.divergences import Divergence, entropy
from adpo.core.groups import Evidence, refuse
from adpo.core.rewards import kernel_cdf, standardized


class Stage(NamedTuple):
    """One comparison: ``D(exp(log_q), softmax(u + log_weight))``; both tables ``[groups, K]``."""

    log_q: Tensor
    log_weight: Tensor

    def support(self) -> Tensor:
        return self.log_weight > -torch.inf

    def compare(self, divergence: Divergence, u: Tensor, positions: Tensor | None) -> Tensor:
        """The divergence of each group, exactly 0 (and attached to ``u``) for silent ones."""
        support = self.support()
        heard = support.any(-1)
        weight = torch.where(support, self.log_weight, 0.0)
        # A silent row keeps all its candidates inside the softmax, so that no NaN is made and then hidden.
        inside = support | ~heard.unsqueeze(-1)
        log_p = torch.log_softmax(torch.where(inside, u + weight, -torch.inf), -1)
        log_p = torch.where(support, log_p, 0.0)
        log_q = torch.where(support, self.log_q, -torch.inf)
        value = torch.where(heard, divergence(log_q, log_p, support, positions), 0.0)
        if not divergence.finite_at_zeros:
            empty = support & (log_q == -torch.inf)
            expected = f"mass everywhere for {divergence}: use label_smoothing"
            for fault in refuse("the target", log_q.exp(), empty, expected):
                value = value + torch.where(fault, torch.nan, 0.0) * u.sum(-1)
        return value


class Target(ABC):
    """What a group's candidates should look like; a frozen value."""

    @property
    def has_zeros(self) -> bool:
        """Whether candidates inside a stage's support may get no mass at all."""
        return False

    @property
    def reads_anchor(self) -> bool:
        """Whether q depends on ``anchor_logp``: then it must be known even where u = 0."""
        return False

    @abstractmethod
    def stages(self, evidence: Evidence) -> Iterable[Stage]:
        """The stages, from the signals of the groups."""

    def compare(self, divergence: Divergence, u: Tensor, evidence: Evidence, positions: Tensor | None) -> Tensor:
        """``sum over stages of D(q, softmax(u + log_weight))``, ``[groups]``."""
        total = (0 * u).sum(-1)  # without a single stage, still attached to u
        for stage in self.stages(evidence):
            total = total + stage.compare(divergence, u, positions)
        return total

    def entropy(self, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """Entropy of q summed over the heard stages, and how many there are; both ``[groups]``."""
        total = torch.zeros(len(evidence.mask), dtype=torch.float64, device=evidence.mask.device)
        count = torch.zeros_like(total, dtype=torch.long)
        for stage in self.stages(evidence):
            support = stage.support()
            heard = support.any(-1)
            total = total + torch.where(heard, entropy(stage.log_q, support), 0.0)
            count = count + heard
        return total, count


@dataclass(frozen=True)
class _SmoothedTarget(Target):
    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1); got {self.label_smoothing}")

    @property
    def has_zeros(self) -> bool:
        return self.label_smoothing == 0

    def _stage(self, q: Tensor, support: Tensor) -> Stage:
        """A stage from probabilities, smoothed; groups of one candidate say nothing."""
        size = support.sum(-1, keepdim=True).to(torch.float64)
        q = (1 - self.label_smoothing) * q + self.label_smoothing / size.clamp(min=1)
        return Stage(q.log(), _log_weight(support & (size > 1)))


def _log_weight(support: Tensor) -> Tensor:
    return torch.where(support, 0.0, -torch.inf).to(torch.float64)


def _softmax_stage(logits: Tensor, mask: Tensor) -> Stage:
    # A padding group keeps its cells, for the softmax's sake; its weights silence it.
    inside = mask | ~mask.any(-1, keepdim=True)
    return Stage(torch.log_softmax(torch.where(inside, logits, -torch.inf), -1), _log_weight(mask))


def positive(name: str, value: float) -> float:
    """The value, or one line that says what is wrong with it."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite; got {value}")
    return value


@dataclass(frozen=True)
class one_hot(_SmoothedTarget):
    """All mass on the labelled candidate (signal ``labels``, ``[groups]``, an index)."""

    def stages(self, evidence: Evidence) -> list[Stage]:
        _, labels = evidence.need("one_hot()", "labels")
        candidates = torch.arange(evidence.mask.shape[1], device=labels.device)
        q = (candidates == labels.unsqueeze(-1)) & evidence.mask
        unlabelled = evidence.mask.any(-1) & ~q.any(-1)
        evidence.refuse("labels", labels, unlabelled, "the index of an unmasked candidate of the group")
        return [self._stage(q.to(torch.float64), evidence.mask)]


@dataclass(frozen=True)
class soft(_SmoothedTarget):
    """Any distribution over the group (signal ``q``, ``[groups, K]``, rows summing to 1)."""

    @property
    def has_zeros(self) -> bool:
        return False  # depends on the data, so the stage looks when it is compared

    def stages(self, evidence: Evidence) -> list[Stage]:
        _, q = evidence.need("soft()", "q")
        evidence.refuse("q", q, q < 0, "a probability")
        total = q.sum(-1)
        # Rows normalised in half precision miss 1 by some thousandths; they are normalised again.
        off = evidence.mask.any(-1) & ((total - 1).abs() > 1e-2)
        evidence.refuse("the sum of q", total, off, "1 over the unmasked candidates")
        return [self._stage(q / total.clamp(min=1e-300).unsqueeze(-1), evidence.mask)]


@dataclass(frozen=True)
class teacher(Target):
    """A teacher's distribution over the group (signal ``teacher_logp``, ``[groups, K]``).

    Plain: ``softmax(teacher_logp)``; with a non-zero anchor the optimum ``anchor * teacher^tau`` is biased.
    Anchored: ``softmax((teacher_logp - anchor_logp)/tau)``; the optimum is the teacher for every anchor and tau.
    """

    anchored: bool = False

    @property
    def reads_anchor(self) -> bool:
        return self.anchored

    def stages(self, evidence: Evidence) -> list[Stage]:
        _, logits = evidence.need("teacher()", "teacher_logp")
        if self.anchored:
            logits = (logits - evidence.anchor_logp) / evidence.tau
        return [_softmax_stage(logits, evidence.mask)]


@dataclass(frozen=True)
class bradley_terry(_SmoothedTarget):
    """A pair (K = 2): ``rewards`` (the higher wins, tied = silent) or ``preference`` = P(candidate 0 wins)."""

    def stages(self, evidence: Evidence) -> list[Stage]:
        if evidence.mask.shape[1] != 2:
            raise ValueError(f"bradley_terry() compares pairs, K = 2; got K = {evidence.mask.shape[1]}")
        name, signal = evidence.need("bradley_terry()", "rewards", "preference")
        support = evidence.mask
        if name == "rewards":
            first = (signal[:, 0] > signal[:, 1]).to(torch.float64)
            support = support & (signal[:, :1] != signal[:, 1:])
        else:
            evidence.refuse(name, signal, (signal < 0) | (signal > 1), "a probability")
            first = signal
        return [self._stage(torch.stack([first, 1 - first], -1), support)]


@dataclass(frozen=True)
class boltzmann(Target):
    """``softmax(A / beta)`` over the rewards (signal ``rewards``).

    ``standardize=True`` takes each group's z-scores (population standard deviation; a tied group becomes
    uniform). ``reference=True`` puts the prior inside, ``softmax(anchor_logp + A/beta)``, as one passage of the
    paper does; the prior then counts twice at the optimum.
    """

    beta: float
    standardize: bool = False
    reference: bool = False

    def __post_init__(self) -> None:
        positive("beta", self.beta)

    @property
    def reads_anchor(self) -> bool:
        return self.reference

    def stages(self, evidence: Evidence) -> list[Stage]:
        _, rewards = evidence.need("boltzmann()", "rewards")
        advantages = standardized(rewards, evidence.mask) if self.standardize else rewards
        # Measured from the best, huge rewards and a tiny beta overflow to -inf, which is no mass, and not to NaN.
        best = torch.where(evidence.mask, advantages, -torch.inf).amax(-1, keepdim=True)
        logits = torch.where(evidence.mask, advantages - best, 0.0) / self.beta
        if self.reference:
            logits = logits + evidence.anchor_logp
        return [_softmax_stage(logits, evidence.mask)]


@dataclass(frozen=True)
class kde(Target):
    """``softmax(logit(F(r)) / beta)`` with F the group's Gaussian-kernel distribution function.

    Bandwidth ``1.06 s K^(-1/5)`` with ``s = min(std, IQR/1.34)`` (std alone where the IQR is 0), so that one wild
    reward does not blur the others; F is clipped to [1e-4, 1 - 1e-4]; a tied group is uniform. Signal ``rewards``.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        positive("beta", self.beta)

    def stages(self, evidence: Evidence) -> list[Stage]:
        _, rewards = evidence.need("kde()", "rewards")
        cdf = kernel_cdf(rewards, evidence.mask).clamp(1e-4, 1 - 1e-4)
        return [_softmax_stage(torch.logit(cdf) / self.beta, evidence.mask)]


@dataclass(frozen=True)
class top1(_SmoothedTarget):
    """All mass on the best candidate: signal ``rewards``, or ``ranks`` (1 = best).

    Tied winners share it; a group where all are tied is silent.
    """

    def stages(self, evidence: Evidence) -> list[Stage]:
        scores = ordering(evidence, "top1()")
        best = torch.where(evidence.mask, scores, -torch.inf).amax(-1, keepdim=True)
        winner = evidence.mask & (scores == best)
        beaten = (evidence.mask & ~winner).any(-1, keepdim=True)
        q = winner / winner.sum(-1, keepdim=True).clamp(min=1).to(torch.float64)
        return [self._stage(q, evidence.mask & beaten)]


def ordering(evidence: Evidence, asker: str) -> Tensor:
    """Scores whose order is the ranking, higher = better, from ``rewards`` or ``ranks``."""
    name, signal = evidence.need(asker, "rewards", "ranks")
    return -signal if name == "ranks" else signal
