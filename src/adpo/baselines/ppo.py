"""Proximal policy optimization, clipped surrogate (Schulman et al. 2017).

r = pi / pi_old,   -min(r A, clip(r, 1 - eps, 1 + eps) A)
"""

import torch
from torch import Tensor


def ppo_clip_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: float = 0.2) -> Tensor:
    """All of the same shape."""
    ratio = (logp - old_logp.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
