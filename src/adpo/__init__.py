"""Anchored Direct Preference Optimization.

Alignment is one equation, ``D(Q, softmax((logp - anchor_logp) / tau))``, over groups of K candidates. Choose
the coordinates (the anchor), the target Q and the divergence D independently, from `adpo.anchors`, `adpo.targets`
and `adpo.divergences` (those used most stand here, too):

>>> import adpo, torch
>>> objective = adpo.Objective(adpo.plackett_luce(), adpo.cross_entropy, tau=1.0)
>>> logp = torch.zeros(1, 3, requires_grad=True)
>>> round(objective.loss(logp, None, rewards=torch.tensor([[2.0, 1.0, 0.0]])).item(), 4)  # log 3!
1.7918
"""

from typing import TYPE_CHECKING

from adpo import algorithm, anchors, baselines, exact, moved
from adpo.core import divergences, presets, targets
from adpo.core.divergences import Divergence, cross_entropy, forward_kl, reverse_kl, wasserstein
from adpo.core.groups import from_flat, to_flat, to_table
from adpo.core.objective import Diagnostics, Objective, anchored_logits
from adpo.core.targets import Stage, Target, boltzmann, bradley_terry, kde, one_hot, plackett_luce, top1
from adpo.core.temperature import ConstantTau, GuardedTau, HybridTau, Temperature
from adpo.deprecated import renamed
from adpo.scoring.sequences import Sequences, seq_logp, sequences, token_logp

__version__ = "0.1.0"
moved.install()

__all__ = [
    "ConstantTau",
    "Diagnostics",
    "Divergence",
    "GuardedTau",
    "HybridTau",
    "Objective",
    "Sequences",
    "Stage",
    "Target",
    "Temperature",
    "algorithm",
    "anchored_logits",
    "anchors",
    "baselines",
    "boltzmann",
    "bradley_terry",
    "cross_entropy",
    "divergences",
    "exact",
    "forward_kl",
    "from_flat",
    "kde",
    "one_hot",
    "plackett_luce",
    "presets",
    "reverse_kl",
    "seq_logp",
    "sequences",
    "targets",
    "to_flat",
    "to_table",
    "token_logp",
    "top1",
    "wasserstein",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
