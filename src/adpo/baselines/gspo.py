"""Group sequence policy optimization (Zheng et al. 2025): the ratio of whole sequences, length-normalised.

    s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|)
    plain            -min(s_i A_i, clip(s_i) A_i)
    per token        s_it = sg[s_i] pi(y_it) / sg[pi(y_it)], the straight-through form that the paper prints

Both have the same value and the same gradient. The usual clip is about 3e-4, not PPO's 0.2.
"""

import torch
from torch import Tensor


def _log_sequence_ratio(token_logp: Tensor, old_token_logp: Tensor, mask: Tensor) -> Tensor:
    difference = torch.where(mask.bool(), token_logp - old_token_logp.detach(), 0.0)
    return difference.sum(-1) / mask.sum(-1).clamp(min=1)


def gspo_loss(
    token_logp: Tensor, old_token_logp: Tensor, advantages: Tensor, mask: Tensor, clip: float = 3e-4
) -> Tensor:
    """``token_logp`` and ``mask`` [sequences, tokens], ``advantages`` [sequences]."""
    ratio = _log_sequence_ratio(token_logp, old_token_logp, mask).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


def gspo_token_loss(
    token_logp: Tensor, old_token_logp: Tensor, advantages: Tensor, mask: Tensor, clip: float = 3e-4
) -> Tensor:
    """The straight-through per-token form; arguments as in `gspo_loss`."""
    sequence = _log_sequence_ratio(token_logp, old_token_logp, mask).detach().unsqueeze(-1)
    straight_through = torch.where(mask.bool(), token_logp - token_logp.detach(), 0.0)
    ratio = (straight_through + sequence).exp()
    advantage = advantages.unsqueeze(-1)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
