"""The rows of the paper's taxonomy, each one setting of the same equation.

An `Objective` holds target, divergence and tau; the anchor is what the caller passes as ``anchor_logp``. SFT and
KD equal their textbook losses where the candidates are the full support; over a sampled group they are
contrastive (only ratios inside the group are learnt).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from adpo.core.divergences import reverse_kl
from adpo.core.objective import Objective
from adpo.core.ranking import plackett_luce
from adpo.core.targets import boltzmann, bradley_terry, one_hot, positive, teacher
from adpo.core.targets import top1 as top1_target

Make = Callable[..., Objective]


class Row(NamedTuple):
    """A line of the taxonomy; target, divergence and tau are read off the objective itself."""

    algorithm: str
    preset: Make
    anchor: str
    behaviour: str

    @property
    def objective(self) -> Objective:
        return self.preset()


TAXONOMY: list[Row] = []


def _row(algorithm: str, anchor: str, behaviour: str) -> Callable[[Make], Make]:
    def register(preset: Make) -> Make:
        TAXONOMY.append(Row(algorithm, preset, anchor, behaviour))
        return preset

    return register


@_row("SFT", "zero", "recites the labelled answer")
def sft() -> Objective:
    """Maximum likelihood of the labelled candidate. Signal ``labels``; pass no anchor."""
    return Objective(one_hot())


@_row("KD", "zero", "imitates the teacher's probabilities")
def kd() -> Objective:
    """Distillation. Signal ``teacher_logp``; pass no anchor."""
    return Objective(teacher())


@_row("DPO", "fixed", "classifies which of two is better")
def dpo(beta: float = 0.1) -> Objective:
    """Direct preference optimization on hard pairs, tau = 1/beta. Signal ``rewards`` or ``preference``."""
    return Objective(bradley_terry(), tau=1 / positive("beta", beta))


@_row("DPO, soft labels", "fixed", "regresses how often one beats the other")
def soft_dpo(beta: float = 0.1) -> Objective:
    """The same target with ``preference`` = P(candidate 0 wins): ``softplus(beta D) - q beta D``."""
    return Objective(bradley_terry(), tau=1 / positive("beta", beta))


@_row("ADPO", "any", "regresses the standardised advantage")
def adpo(beta: float = 1.0, tau: float = 1.0) -> Objective:
    """Algorithm 1: Boltzmann target over z-scored rewards. Signal ``rewards``."""
    return Objective(boltzmann(beta, standardize=True), tau=tau)


@_row("ADPO, raw rewards", "any", "regresses the reward itself")
def listwise_raw(beta: float = 1.0, tau: float = 1.0) -> Objective:
    """Boltzmann target over the rewards as they are. Signal ``rewards``."""
    return Objective(boltzmann(beta), tau=tau)


@_row("Anchored ranking", "any", "races for every place, in order")
def anchored_ranking(tau: float = 1.0, ties: Literal["efron", "breslow"] = "efron") -> Objective:
    """Plackett-Luce over anchored logits. Signal ``rewards`` or ``ranks``."""
    return Objective(plackett_luce(ties=ties), tau=tau)


@_row("Anchored top-1", "any", "races for the first place")
def top1(tau: float = 1.0) -> Objective:
    """The winner against the field. Signal ``rewards`` or ``ranks``."""
    return Objective(top1_target(), tau=tau)


@_row("Reverse ADPO", "any", "seeks the best mode")
def reverse_adpo(beta: float = 1.0, tau: float = 1.0) -> Objective:
    """Boltzmann target, reverse KL. Signal ``rewards``."""
    return Objective(boltzmann(beta), reverse_kl, tau)
