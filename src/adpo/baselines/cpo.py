"""Contrastive preference optimization (Xu et al. 2024): DPO without a reference, plus the chosen's likelihood.

-log sigmoid(beta (log pi(w) - log pi(l))) - nll_weight log pi(w)
"""

import torch.nn.functional as F
from torch import Tensor


def cpo_loss(chosen_logp: Tensor, rejected_logp: Tensor, beta: float = 0.1, nll_weight: float = 1.0) -> Tensor:
    """Both [n]."""
    return (-F.logsigmoid(beta * (chosen_logp - rejected_logp)) - nll_weight * chosen_logp).mean()
