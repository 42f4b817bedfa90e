"""Knowledge distillation (Hinton et al. 2015): ``-sum_a pi_T(a) log pi(a)``."""

import torch
from torch import Tensor


def kd_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Both [n, actions] over the full support; the teacher is a constant."""
    return -(torch.softmax(teacher_logits.detach(), -1) * torch.log_softmax(logits, -1)).sum(-1).mean()
