"""The ways to make a student: each turns what it sees of a teacher into a loss.

ADPO's and the paper's distillation are settings of `adpo.Objective` over candidates ``u`` of a state; the rest are
textbook. Densities are those before the squash: the squash adds the same to every policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adpo.core.objective import Objective
from adpo.core.ranking import plackett_luce
from adpo.core.targets import teacher as teacher_target
from adpo.experiments.distill.actor import Gaussian

AnchorRule = Literal["zero", "self", "ema"]


@dataclass
class Batch:
    """Some states of all runs of a method; ``[runs, n, ...]``."""

    student: Gaussian  # differentiable
    teacher: Gaussian
    anchor: Gaussian | None  # None: the zero anchor
    candidates: Tensor  # [.., K, actions], before the squash; none where the method looks at none
    shown: Tensor  # [.., actions]: what the teacher did, before the squash
    tau: Tensor | None = None  # [runs], from a schedule


Loss = Callable[[Batch], Tensor]
"""The mean loss of each run, ``[runs]``."""


@dataclass(frozen=True)
class Method:
    """A method with its hyper-parameters fixed."""

    name: str
    loss: Loss
    anchor: AnchorRule = "zero"
    decay: float = 0.99  # of an averaged anchor
    guarded: tuple[float, float] | None = None  # bounds of the guarded temperature

    @property
    def compares(self) -> bool:
        """Whether it looks at candidates."""
        return isinstance(self.loss, Groupwise)


@dataclass(frozen=True)
class Groupwise:
    """An objective over the candidates of a state as a group."""

    objective: Objective
    signal: str = "teacher_logp"

    def __call__(self, batch: Batch) -> Tensor:
        """The student sees of the loss one number per candidate, ``c``: what is returned has its slope."""
        runs, n, k, _ = batch.candidates.shape
        student = Gaussian(*(part.detach().unsqueeze(2) for part in batch.student))
        z = (batch.candidates - student.mean) * (-student.log_std).exp()
        squares = z.square()
        of_student = -(0.5 * squares + student.log_std).sum(-1).view(-1, k)

        def table(policy: Gaussian) -> Tensor:
            spread = Gaussian(*(part.unsqueeze(2) for part in policy))
            return spread.standard_logp(batch.candidates).view(-1, k)

        if batch.anchor is None:
            of_anchor = None
        else:
            of_anchor = of_student if batch.anchor.mean is batch.student.mean else table(batch.anchor)
        c = self.objective.coefficients(
            of_student,
            of_anchor,
            tau=None if batch.tau is None else batch.tau.repeat_interleave(n),
            reduction="sum",
            **{self.signal: table(batch.teacher)},
        ).view(runs, n, k, 1)
        by_mean = (c * z).sum(2) * (-batch.student.log_std.detach()).exp()
        by_log_std = (c * squares).sum(2)  # less sum c, which is zero
        return (by_mean * batch.student.mean + by_log_std * batch.student.log_std).sum(-1).mean(1)


def closed_form(batch: Batch) -> Tensor:
    """``KL(teacher || student)`` of the Gaussians."""
    return batch.teacher.kl(batch.student).mean(1)


def squared(batch: Batch) -> Tensor:
    """Behaviour cloning: the action shown against the action in the middle; says nothing of the spread."""
    return (torch.tanh(batch.student.mean) - torch.tanh(batch.shown)).square().sum(-1).mean(1)


def likelihood(batch: Batch) -> Tensor:
    """Behaviour cloning: the likelihood of the action shown."""
    return -batch.student.logp(batch.shown).mean(1)


def methods(tau: float = 1.0, decay: float = 0.99) -> dict[str, Method]:
    """By name, in the order of the tables."""
    plain, anchored = (Groupwise(Objective(teacher_target(anchored), tau=tau)) for anchored in (False, True))
    ranks = Groupwise(Objective(plackett_luce(), tau=tau), "rewards")
    made = (
        Method("KD, candidates", plain),
        Method("KD, closed form", closed_form),
        Method("BC, squared error", squared),
        Method("BC, likelihood", likelihood),
        Method("ADPO self-anchor", plain, "self"),
        Method("ADPO self-anchor EMA", plain, "ema", decay),
        Method("ADPO anchored target", anchored, "self"),
        Method("ADPO anchored target EMA", anchored, "ema", decay),
        Method("ADPO anchored target, guarded tau", anchored, "self", guarded=(0.5, 2.0)),
        Method("ADPO Plackett-Luce", ranks, "self"),
    )
    return {method.name: method for method in made}
