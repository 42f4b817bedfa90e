"""Advantage-weighted likelihood.

    AWR (Peng et al. 2019)             -exp(A / beta) log pi, weights capped
    MPO (Abdolmaleki et al. 2018)      -softmax(A / beta) log pi over a group drawn from the old policy

MPO's step is the M-projection on ``pi_old exp(A/beta)``.
"""

import torch
from torch import Tensor


def awr_loss(logp: Tensor, advantages: Tensor, beta: float = 1.0, max_weight: float = 20.0) -> Tensor:
    """Both of the same shape."""
    return -((advantages.detach() / beta).exp().clamp(max=max_weight) * logp).mean()


def mpo_loss(logp: Tensor, advantages: Tensor, beta: float = 1.0) -> Tensor:
    """Both [groups, K]."""
    return -(torch.softmax(advantages.detach() / beta, -1) * logp).sum(-1).mean()
