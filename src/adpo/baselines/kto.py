"""Kahneman-Tversky optimization (Ethayarajh et al. 2024): unpaired good and bad candidates.

r = log pi - log ref,   z = max(0, KL estimate), a constant
good: weight (1 - sigmoid(beta (r - z)))       bad: weight (1 - sigmoid(beta (z - r)))
"""

import torch
from torch import Tensor


def kto_loss(
    logp: Tensor,
    ref_logp: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``logp``, ``ref_logp`` [n], ``desirable`` [n] bool; ``kl`` an estimate of KL(pi || ref) over the batch."""
    reference_point = torch.as_tensor(kl, dtype=logp.dtype, device=logp.device).detach().clamp(min=0)
    gain = beta * (logp - ref_logp.detach() - reference_point)
    good = desirable_weight * (1 - torch.sigmoid(gain))
    bad = undesirable_weight * (1 - torch.sigmoid(-gain))
    return torch.where(desirable, good, bad).mean()
