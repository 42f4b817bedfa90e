"""Group relative policy optimization (Shao et al. 2024) and Dr. GRPO (Liu et al. 2025).

A_i = (R_i - mean R) / (std R + 1e-4)     (Dr. GRPO: no division)
r_t = pi(y_t) / pi_old(y_t),   l_t = -min(r_t A, clip(r_t) A) + beta (ref/pi - 1 - log ref/pi)
GRPO: mean over sequences of the mean over tokens;   Dr. GRPO: sum of tokens / (sequences * max_length)
"""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, scale: bool = True) -> Tensor:
    """``rewards`` [groups, K]: centred, and divided by the sample standard deviation (K = 1: zero)."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    if rewards.shape[-1] == 1:
        return centred
    return centred / (rewards.std(-1, keepdim=True) + 1e-4) if scale else centred


def token_losses(
    token_logp: Tensor,
    old_token_logp: Tensor,
    advantages: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
    ref_token_logp: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """l_t above, 0 on padding; ``token_logp`` [sequences, tokens], ``advantages`` [sequences]."""
    real = torch.ones_like(token_logp, dtype=torch.bool) if mask is None else mask.bool()
    ratio = torch.where(real, token_logp - old_token_logp.detach(), 0.0).exp()
    advantage = advantages.unsqueeze(-1)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
    if ref_token_logp is not None:
        log_ratio = torch.where(real, ref_token_logp.detach() - token_logp, 0.0)
        loss = loss + beta * (log_ratio.exp() - 1 - log_ratio)
    return torch.where(real, loss, 0.0)


def grpo_loss(
    token_logp: Tensor,
    old_token_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
    ref_token_logp: Tensor | None = None,
) -> Tensor:
    """``mask`` [sequences, tokens], true on real tokens."""
    loss = token_losses(token_logp, old_token_logp, advantages, clip, beta, ref_token_logp, mask)
    return (loss.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def dr_grpo_loss(
    token_logp: Tensor,
    old_token_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    max_length: int,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Tensor:
    """``advantages`` from `group_advantages` with ``scale=False``; ``max_length`` a constant of the run."""
    loss = token_losses(token_logp, old_token_logp, advantages, clip, mask=mask)
    return loss.sum() / (len(token_logp) * max_length)
