"""The methods: each a loss of the table of log-probabilities ``[groups, K]``, and what it is tuned over.

Strength is DPO's beta everywhere: tau = 1/beta in the anchored methods, the target margin 1/(2 beta) in IPO, and
in SimPO the factor of the mean log-probability per token, with a margin gamma of half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adpo.baselines import dpo_loss, ipo_loss, kto_loss, simpo_loss
from adpo.core.objective import Objective
from adpo.core.ranking import plackett_luce
from adpo.core.targets import Target, boltzmann, top1

Score = Literal["log_ratio", "mean_logp"]
SCORES: tuple[Score, ...] = ("log_ratio", "mean_logp")


class Table(NamedTuple):
    """What a loss sees, all ``[groups, K]`` in float64; gradients flow to the first two."""

    seq_logp: Tensor  # log-probability of the response
    mean_logp: Tensor  # the same per token
    ref_logp: Tensor  # seq_logp under the model that training began with
    labels: Tensor
    mask: Tensor  # true = a real response


Loss = Callable[[Table, float], Tensor]


@dataclass(frozen=True)
class Method:
    """A loss, the strengths it is tuned over, the score it ranks by, and whether it sees pairs or lists."""

    loss: Loss
    strengths: tuple[float, ...]
    score: Score = "log_ratio"
    pair: bool = False  # best and worst of a list alone


def anchored(target: Target) -> Loss:
    """The whole list at once, ``D(Q, softmax((seq_logp - ref_logp) / tau))``."""

    def loss(table: Table, strength: float) -> Tensor:
        objective = Objective(target, tau=1 / strength)
        return objective.loss(table.seq_logp, table.ref_logp, rewards=table.labels, mask=table.mask)

    return loss


def preferences(table: Table) -> tuple[Tensor, Tensor]:
    """Cells of the flattened table: winner and loser of every pair of a list with different labels."""
    better = table.labels.unsqueeze(2) > table.labels.unsqueeze(1)
    real = table.mask.unsqueeze(2) & table.mask.unsqueeze(1)
    group, winner, loser = (better & real).nonzero(as_tuple=True)
    width = table.labels.shape[1]
    return group * width + winner, group * width + loser


def dpo(table: Table, strength: float) -> Tensor:
    logp, ref = table.seq_logp.flatten(), table.ref_logp.flatten()
    winner, loser = preferences(table)
    return dpo_loss(logp[winner], logp[loser], ref[winner], ref[loser], strength)


def ipo(table: Table, strength: float) -> Tensor:
    logp, ref = table.seq_logp.flatten(), table.ref_logp.flatten()
    winner, loser = preferences(table)
    return ipo_loss(logp[winner], logp[loser], ref[winner], ref[loser], strength)


def simpo(table: Table, strength: float) -> Tensor:
    mean_logp = table.mean_logp.flatten()
    winner, loser = preferences(table)
    return simpo_loss(mean_logp[winner], mean_logp[loser], strength, gamma=strength / 2)


def kto(table: Table, strength: float) -> Tensor:
    """Good is what lies above the median of its list; the reference point is the mean log-ratio of the step."""
    labels = torch.where(table.mask, table.labels, torch.nan)
    desirable = table.labels > labels.nanmedian(-1, keepdim=True).values
    logp, ref = table.seq_logp[table.mask], table.ref_logp[table.mask]
    return kto_loss(logp, ref, desirable[table.mask], (logp - ref).mean(), strength)


BETAS = (0.1, 0.03, 0.3)  # the middle first: a smaller sweep tries the first ones
METHODS: dict[str, Method] = {
    "adpo-ranking": Method(anchored(plackett_luce()), BETAS),
    "adpo-boltzmann": Method(anchored(boltzmann(1.0, standardize=True)), BETAS),
    "adpo-top1": Method(anchored(top1()), BETAS),
    "dpo-pair": Method(dpo, BETAS, pair=True),
    "dpo-all": Method(dpo, BETAS),
    "ipo-pair": Method(ipo, BETAS, pair=True),
    "ipo-all": Method(ipo, BETAS),
    "simpo-pair": Method(simpo, (3.0, 1.0, 10.0), "mean_logp", pair=True),
    "simpo-all": Method(simpo, (3.0, 1.0, 10.0), "mean_logp"),
    "kto": Method(kto, BETAS),
}
