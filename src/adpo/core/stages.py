"""What a target is: a stack of stages, each one comparison with the anchored policy.

A stage is ``(log_q, log_weight)``, compared with ``softmax(u + log_weight)``: weight -inf takes a candidate out of
the support, a row of -inf makes the stage silent for that group. A target that is one distribution has one stage;
a ranking (`adpo.core.ranking`) has up to K - 1.

A target of your own is a frozen dataclass with one method, `Target.stages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from adpo.core.divergences import Divergence, entropy, log_softmax
from adpo.core.groups import Groups, refuse


class Stage(NamedTuple):
    """One comparison: ``D(exp(log_q), softmax(u + log_weight))``; both tables ``[groups, K]``, float64.

    >>> from adpo.core.divergences import cross_entropy
    >>> stage = Stage(torch.tensor([[0.0, -torch.inf]]), torch.zeros(1, 2))
    >>> stage.compare(cross_entropy, torch.zeros(1, 2), None).exp().tolist()
    [2.0]
    """

    log_q: Tensor
    log_weight: Tensor

    def support(self) -> Tensor:
        """The candidates that are compared, ``[groups, K]``."""
        return self.log_weight > -torch.inf

    def compare(self, divergence: Divergence, u: Tensor, positions: Tensor | None) -> Tensor:
        """The divergence of each group, exactly 0 (and attached to ``u``) for silent ones."""
        support = self.support()
        log_p = log_softmax(u + torch.where(support, self.log_weight, 0.0), support)
        log_q = torch.where(support, self.log_q, -torch.inf)
        value = torch.where(support.any(-1), divergence(log_q, log_p, support, positions), 0.0)
        if not divergence.finite_at_zeros:
            empty = support & (log_q == -torch.inf)
            expected = f"mass everywhere for {divergence}: use label_smoothing, or cross_entropy"
            for fault in refuse("the target", log_q.exp(), empty, expected):
                value = value + torch.where(fault, torch.nan, 0.0) * u.sum(-1)
        return value


class Target(ABC):
    """What a group's candidates should look like; a frozen value.

    >>> class uniform(Target):
    ...     def stages(self, groups):
    ...         log_weight = torch.where(groups.mask, 0.0, -torch.inf).double()
    ...         return [Stage(torch.log_softmax(log_weight, -1), log_weight)]
    >>> import adpo
    >>> adpo.Objective(uniform()).coefficients(torch.tensor([[0.75, 0.25]]).log()).tolist()
    [[0.25, -0.25]]
    """

    @property
    def has_zeros(self) -> bool:
        """Whether candidates inside a stage's support get no mass, whatever the signals are."""
        return False

    @property
    def reads_anchor(self) -> bool:
        """Whether q depends on ``anchor_logp``: then it must be known even where u = 0."""
        return False

    @abstractmethod
    def stages(self, groups: Groups) -> Iterable[Stage]:
        """The stages, from the signals of the groups."""

    def cross_entropy(self, u: Tensor, groups: Groups) -> Tensor | None:  # noqa: ARG002
        """Cross-entropy summed over all stages, ``[groups]``, where the target has a closed form of it."""
        return None

    def compare(self, divergence: Divergence, u: Tensor, groups: Groups, positions: Tensor | None) -> Tensor:
        """``sum over stages of D(q, softmax(u + log_weight))``, ``[groups]``; in closed form if there is one."""
        closed = None if divergence.entropies is None else self.cross_entropy(u, groups)
        if closed is None:
            return self.compare_stages(divergence, u, groups, positions)
        return closed - divergence.entropies * self.entropy(groups)[0] if divergence.entropies else closed

    def compare_stages(
        self, divergence: Divergence, u: Tensor, groups: Groups, positions: Tensor | None
    ) -> Tensor:
        """The same, stage by stage."""
        total = (0 * u).sum(-1)  # without a single stage, still attached to u
        for stage in self.stages(groups):
            total = total + stage.compare(divergence, u, positions)
        return total

    def entropy(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Entropy of q summed over the stages that are not silent, and how many those are; both ``[groups]``."""
        total = torch.zeros(len(groups.mask), dtype=torch.float64, device=groups.mask.device)
        count = torch.zeros_like(total, dtype=torch.long)
        for stage in self.stages(groups):
            support = stage.support()
            compared = support.any(-1)
            total = total + torch.where(compared, entropy(stage.log_q, support), 0.0)
            count = count + compared
        return total, count


@dataclass(frozen=True)
class SmoothedTarget(Target):
    """A target with ``label_smoothing``: each stage is mixed with the uniform distribution over its support."""

    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1); got {self.label_smoothing}")

    @property
    def has_zeros(self) -> bool:
        return self.label_smoothing == 0

    def smoothed(self, q: Tensor, support: Tensor) -> Stage:
        """A stage from probabilities; groups of one candidate compare nothing."""
        size = support.sum(-1, keepdim=True).to(torch.float64)
        q = (1 - self.label_smoothing) * q + self.label_smoothing / size.clamp(min=1)
        return stage_over(q.log(), support & (size > 1))


def stage_over(log_q: Tensor, support: Tensor) -> Stage:
    """A stage with weight 1 on the support.

    >>> stage_over(torch.zeros(1, 2), torch.tensor([[True, False]])).log_weight.tolist()
    [[0.0, -inf]]
    """
    return Stage(log_q, torch.where(support, 0.0, -torch.inf).to(torch.float64))


def softmax_stage(logits: Tensor, mask: Tensor) -> Stage:
    """``softmax(logits)`` over the real candidates.

    >>> softmax_stage(torch.zeros(1, 3), torch.tensor([[True, True, False]])).log_q.exp().tolist()
    [[0.5, 0.5, 1.0]]
    """
    return stage_over(log_softmax(logits, mask), mask)


def best_first(groups: Groups, caller: str) -> Tensor:
    """Scores whose order is the ranking, higher = better, ``[groups, K]``, from ``rewards`` or ``ranks``.

    >>> from adpo.core.groups import prepare
    >>> _, groups = prepare(torch.zeros(1, 2), None, 1.0, {"ranks": torch.tensor([[1, 2]])})
    >>> best_first(groups, "my_target()").tolist()
    [[-1.0, -2.0]]
    """
    name, signal = groups.need(caller, "rewards", "ranks")
    return -signal if name == "ranks" else signal
