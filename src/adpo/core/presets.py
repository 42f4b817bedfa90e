"""The rows of the paper's taxonomy, each one setting of the same equation.

An `Objective` holds target, divergence and tau; the anchor is what the caller passes as ``anchor_logp``. SFT and
KD equal their textbook losses where the candidates are the full support; over a sampled group they are
contrastive (only ratios inside the group are learnt).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from adpo.core import targets
from adpo.core.divergences import reverse_kl
from adpo.core.groups import positive
from adpo.core.objective import Objective
from adpo.deprecated import renamed

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
    """Maximum likelihood of the labelled candidate, ``-logp[label]``. Signal ``labels``; pass no anchor.

    >>> import torch
    >>> sft().loss(torch.tensor([[0.75, 0.25]]).log(), labels=torch.tensor([1])).exp().item()
    4.0
    """
    return Objective(targets.one_hot())


@_row("KD", "zero", "imitates the teacher's probabilities")
def kd() -> Objective:
    """Distillation, ``-sum softmax(teacher_logp) logp``. Signal ``teacher_logp``; pass no anchor.

    >>> import torch
    >>> q = torch.tensor([[0.5, 0.5]])
    >>> kd().coefficients(torch.tensor([[0.75, 0.25]]).log(), teacher_logp=q.log()).tolist()
    [[0.25, -0.25]]
    """
    return Objective(targets.teacher())


@_row("DPO", "fixed", "classifies which of two is better")
def dpo(beta: float = 0.1) -> Objective:
    """Direct preference optimization on hard pairs: ``-logsigmoid(beta D)``, tau = 1/beta.

    D is how much more the winner than the loser has gained on the anchor. Signal ``rewards`` or ``preference``.

    >>> import torch
    >>> logp, anchor_logp = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.0]])
    >>> loss = dpo(beta=0.5).loss(logp, anchor_logp, rewards=torch.tensor([[1.0, 0.0]]))
    >>> torch.allclose(loss, -torch.nn.functional.logsigmoid(torch.tensor(0.5 * 2.0)))
    True
    """
    return Objective(targets.bradley_terry(), tau=1 / positive("beta", beta))


@_row("DPO, soft labels", "fixed", "regresses how often one beats the other")
def soft_dpo(beta: float = 0.1) -> Objective:
    """The same target with ``preference`` = q = P(candidate 0 wins): ``softplus(beta D) - q beta D``.

    >>> import torch
    >>> even = torch.zeros(1, 2)
    >>> soft_dpo(beta=0.5).coefficients(even, even, preference=torch.tensor([0.75])).tolist()
    [[-0.125, 0.125]]
    """
    return dpo(beta)


@_row("ADPO", "any", "regresses the standardised advantage")
def adpo(beta: float = 1.0, tau: float = 1.0) -> Objective:
    """Algorithm 1: Boltzmann target over z-scored rewards, ``softmax(z / beta)``. Signal ``rewards``.

    >>> import torch
    >>> logp = torch.zeros(1, 2)
    >>> adpo().coefficients(logp, logp, rewards=torch.tensor([[9.0, 5.0]])).round(decimals=2)  # z = 1 and -1
    tensor([[-0.3800,  0.3800]])
    """
    return Objective(targets.boltzmann(beta, standardize=True), tau=tau)


@_row("ADPO, raw rewards", "any", "regresses the reward itself")
def listwise_raw(beta: float = 1.0, tau: float = 1.0) -> Objective:
    """Boltzmann target over the rewards as they are, ``softmax(rewards / beta)``. Signal ``rewards``.

    >>> import torch
    >>> logp = torch.zeros(1, 2)
    >>> listwise_raw(beta=2.0).coefficients(logp, logp, rewards=torch.tensor([[9.0, 5.0]])).round(decimals=2)
    tensor([[-0.3800,  0.3800]])
    """
    return Objective(targets.boltzmann(beta), tau=tau)


@_row("Anchored ranking", "any", "races for every place, in order")
def anchored_ranking(tau: float = 1.0, ties: Literal["efron", "breslow"] = "efron") -> Objective:
    """Plackett-Luce over anchored logits, ``sum_j logsumexp(u_j ... u_K) - u_j``. Signal ``rewards`` or ``ranks``.

    >>> import torch
    >>> logp = torch.zeros(1, 3)
    >>> anchored_ranking().loss(logp, logp, ranks=torch.tensor([[2, 1, 3]])).exp().round().item()  # 3!
    6.0
    """
    return Objective(targets.plackett_luce(ties=ties), tau=tau)


@_row("Anchored top-1", "any", "races for the first place")
def anchored_top1(tau: float = 1.0) -> Objective:
    """The winner against the field, ``logsumexp(u) - u[best]``. Signal ``rewards`` or ``ranks``.

    >>> import torch
    >>> logp = torch.zeros(1, 4)
    >>> anchored_top1().coefficients(logp, logp, ranks=torch.tensor([[2, 1, 3, 4]])).tolist()
    [[0.25, -0.75, 0.25, 0.25]]
    """
    return Objective(targets.top1(), tau=tau)


@_row("Reverse ADPO", "any", "seeks the best mode")
def reverse_adpo(beta: float = 1.0, tau: float = 1.0) -> Objective:
    """Boltzmann target, reverse KL: ``sum p log(p / q)``. Signal ``rewards``.

    >>> import torch
    >>> logp, rewards = torch.tensor([[0.0, -1.0]]), torch.tensor([[2.0, 1.0]])
    >>> reverse_adpo().coefficients(logp, rewards=rewards).abs().sum().item()  # u is the reward: the optimum
    0.0
    """
    return Objective(targets.boltzmann(beta), reverse_kl, tau)


if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
