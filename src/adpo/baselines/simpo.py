"""Simple preference optimization (Meng et al. 2024): length-normalised, no reference, a target margin.

-log sigmoid(beta (mean_logp(w) - mean_logp(l)) - gamma)
"""

import torch.nn.functional as F
from torch import Tensor


def simpo_loss(
    chosen_mean_logp: Tensor, rejected_mean_logp: Tensor, beta: float = 2.0, gamma: float = 1.0
) -> Tensor:
    """Both [n], means over tokens."""
    return -F.logsigmoid(beta * (chosen_mean_logp - rejected_mean_logp) - gamma).mean()
