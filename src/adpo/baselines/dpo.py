"""Direct preference optimization (Rafailov et al. 2023).

D = (log pi(w) - log ref(w)) - (log pi(l) - log ref(l))
hard   -log sigmoid(beta D)
soft   softplus(beta D) - q beta D,   q = P(first beats second)
"""

import torch.nn.functional as F
from torch import Tensor


def log_ratio_margin(
    chosen_logp: Tensor, rejected_logp: Tensor, ref_chosen_logp: Tensor, ref_rejected_logp: Tensor
) -> Tensor:
    """D of the formulas above; all [n]."""
    return (chosen_logp - ref_chosen_logp.detach()) - (rejected_logp - ref_rejected_logp.detach())


def dpo_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Hard labels; all [n]."""
    margin = log_ratio_margin(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return -F.logsigmoid(beta * margin).mean()


def soft_dpo_loss(
    first_logp: Tensor,
    second_logp: Tensor,
    ref_first_logp: Tensor,
    ref_second_logp: Tensor,
    preference: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """``preference`` is the probability that the first beats the second; all [n]."""
    margin = beta * log_ratio_margin(first_logp, second_logp, ref_first_logp, ref_second_logp)
    return (F.softplus(margin) - preference * margin).mean()
