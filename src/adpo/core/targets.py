"""Targets Q: what the anchored policy should look like over the candidates of a group.

Each is a small frozen value that turns the signals it reads into stages (`adpo.core.stages`). Every target here
has one stage; `plackett_luce`, from `adpo.core.ranking`, has one for each place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adpo.core.groups import Groups, positive
from adpo.core.ranking import plackett_luce
from adpo.core.rewards import kernel_cdf, standardized
from adpo.core.stages import SmoothedTarget, Stage, Target, best_first, softmax_stage

__all__ = [
    "SmoothedTarget",
    "Stage",
    "Target",
    "boltzmann",
    "bradley_terry",
    "kde",
    "one_hot",
    "plackett_luce",
    "soft",
    "teacher",
    "top1",
]


@dataclass(frozen=True)
class one_hot(SmoothedTarget):
    """All mass on the labelled candidate (signal ``labels``, ``[groups]``, an index).

    >>> import adpo
    >>> zero, labels = torch.zeros(1, 4), torch.tensor([2])
    >>> adpo.Objective(one_hot()).coefficients(zero, labels=labels).tolist()
    [[0.25, 0.25, -0.75, 0.25]]
    """

    def stages(self, groups: Groups) -> list[Stage]:
        _, labels = groups.need("one_hot()", "labels")
        candidates = torch.arange(groups.mask.shape[1], device=labels.device)
        q = (candidates == labels.unsqueeze(-1)) & groups.mask
        unlabelled = groups.mask.any(-1) & ~q.any(-1)
        groups.refuse("labels", labels, unlabelled, "the index of an unmasked candidate of the group")
        return [self.smoothed(q.to(torch.float64), groups.mask)]


@dataclass(frozen=True)
class soft(SmoothedTarget):
    """Any distribution over the group (signal ``q``, ``[groups, K]``, rows summing to 1).

    >>> import adpo
    >>> adpo.Objective(soft()).coefficients(torch.zeros(1, 2), q=torch.tensor([[0.75, 0.25]])).tolist()
    [[-0.25, 0.25]]
    """

    @property
    def has_zeros(self) -> bool:
        return False  # depends on the data, so the stage looks when it is compared

    def stages(self, groups: Groups) -> list[Stage]:
        _, q = groups.need("soft()", "q")
        groups.refuse("q", q, q < 0, "a probability")
        total = q.sum(-1)
        # Rows normalised in half precision miss 1 by some thousandths; they are normalised again.
        off = groups.mask.any(-1) & ((total - 1).abs() > 1e-2)
        groups.refuse("the sum of q", total, off, "1 over the unmasked candidates")
        return [self.smoothed(q / total.clamp(min=1e-300).unsqueeze(-1), groups.mask)]


@dataclass(frozen=True)
class teacher(Target):
    """A teacher's distribution over the group (signal ``teacher_logp``, ``[groups, K]``).

    Plain: ``softmax(teacher_logp)``; with a non-zero anchor the optimum ``anchor * teacher^tau`` is biased.
    Anchored: ``softmax((teacher_logp - anchor_logp)/tau)``; the optimum is the teacher for every anchor and tau.
    A teacher of -inf gives that candidate no mass, which divergences that are infinite at zeros refuse.

    >>> import adpo
    >>> given = torch.tensor([[0.0, 0.0, 0.0, -torch.inf]])
    >>> adpo.Objective(teacher()).coefficients(torch.zeros(1, 4), teacher_logp=given).round(decimals=3)
    tensor([[-0.0830, -0.0830, -0.0830,  0.2500]])
    """

    anchored: bool = False

    @property
    def reads_anchor(self) -> bool:
        return self.anchored

    def stages(self, groups: Groups) -> list[Stage]:
        _, logits = groups.need("teacher()", "teacher_logp")
        massless = groups.mask.any(-1) & (torch.where(groups.mask, logits, -torch.inf) == -torch.inf).all(-1)
        groups.refuse("teacher_logp", logits[:, 0], massless, "a finite value for some candidate")
        if self.anchored:
            logits = (logits - groups.anchor_logp) / groups.tau
        return [softmax_stage(logits, groups.mask)]


@dataclass(frozen=True)
class bradley_terry(SmoothedTarget):
    """A pair (K = 2): ``rewards`` (the higher wins, tied = silent) or ``preference`` = P(candidate 0 wins).

    The cross-entropy is ``softplus(u_1 - u_0)`` where candidate 0 wins.

    >>> import adpo
    >>> adpo.Objective(bradley_terry()).coefficients(torch.zeros(1, 2), preference=torch.tensor([0.75])).tolist()
    [[-0.25, 0.25]]
    """

    def stages(self, groups: Groups) -> list[Stage]:
        if groups.mask.shape[1] != 2:
            raise ValueError(f"bradley_terry() compares pairs, K = 2; got K = {groups.mask.shape[1]}")
        name, signal = groups.need("bradley_terry()", "rewards", "preference")
        support = groups.mask
        if name == "rewards":
            first = (signal[:, 0] > signal[:, 1]).to(torch.float64)
            support = support & (signal[:, :1] != signal[:, 1:])
        else:
            groups.refuse(name, signal, (signal < 0) | (signal > 1), "a probability")
            first = signal
        return [self.smoothed(torch.stack([first, 1 - first], -1), support)]


@dataclass(frozen=True)
class boltzmann(Target):
    """``softmax(A / beta)`` over the rewards (signal ``rewards``).

    ``standardize=True`` takes each group's z-scores (population standard deviation; a tied group becomes
    uniform). ``reference=True`` puts the prior inside, ``softmax(anchor_logp + A/beta)``, as one passage of the
    paper does; the prior then counts twice at the optimum.

    >>> import adpo
    >>> zero, rewards = torch.zeros(1, 2), torch.tensor([[3.0, 1.0]])
    >>> adpo.Objective(boltzmann(2.0)).coefficients(zero, rewards=rewards).round(decimals=2)
    tensor([[-0.2300,  0.2300]])
    """

    beta: float
    standardize: bool = False
    reference: bool = False

    def __post_init__(self) -> None:
        positive("beta", self.beta)

    @property
    def reads_anchor(self) -> bool:
        return self.reference

    def stages(self, groups: Groups) -> list[Stage]:
        _, rewards = groups.need("boltzmann()", "rewards")
        advantages = standardized(rewards, groups.mask) if self.standardize else rewards
        # Measured from the best, huge rewards and a tiny beta overflow to -inf, which is no mass, and not to NaN.
        best = torch.where(groups.mask, advantages, -torch.inf).amax(-1, keepdim=True)
        logits = torch.where(groups.mask, advantages - best, 0.0) / self.beta
        if self.reference:
            logits = logits + groups.anchor_logp
        return [softmax_stage(logits, groups.mask)]


@dataclass(frozen=True)
class kde(Target):
    """``softmax(logit(F(r)) / beta)`` with F the group's Gaussian-kernel distribution function.

    Bandwidth ``1.06 s K^(-1/5)`` with ``s = min(std, IQR/1.34)`` (std alone where the IQR is 0), so that one wild
    reward does not blur the others; F is clipped to [1e-4, 1 - 1e-4]; a tied group is uniform. Signal ``rewards``.

    >>> import adpo
    >>> rewards = torch.tensor([[1.0, 2.0, 1000.0]])
    >>> adpo.Objective(kde()).coefficients(torch.zeros(1, 3), rewards=rewards).round(decimals=2)
    tensor([[ 0.2500,  0.2500, -0.5000]])
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        positive("beta", self.beta)

    def stages(self, groups: Groups) -> list[Stage]:
        _, rewards = groups.need("kde()", "rewards")
        cdf = kernel_cdf(rewards, groups.mask).clamp(1e-4, 1 - 1e-4)
        return [softmax_stage(torch.logit(cdf) / self.beta, groups.mask)]


@dataclass(frozen=True)
class top1(SmoothedTarget):
    """All mass on the best candidate: signal ``rewards``, or ``ranks`` (1 = best).

    Tied winners share it; a group where all are tied is silent.

    >>> import adpo
    >>> rewards = torch.tensor([[5.0, 5.0, 1.0, 0.0]])
    >>> adpo.Objective(top1()).coefficients(torch.zeros(1, 4), rewards=rewards).tolist()
    [[-0.25, -0.25, 0.25, 0.25]]
    """

    def stages(self, groups: Groups) -> list[Stage]:
        scores = best_first(groups, "top1()")
        best = torch.where(groups.mask, scores, -torch.inf).amax(-1, keepdim=True)
        winner = groups.mask & (scores == best)
        beaten = (groups.mask & ~winner).any(-1, keepdim=True)
        q = winner / winner.sum(-1, keepdim=True).clamp(min=1).to(torch.float64)
        return [self.smoothed(q, groups.mask & beaten)]
