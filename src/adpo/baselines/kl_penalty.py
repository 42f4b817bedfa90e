"""Policy gradient with a KL penalty, which the paper calls "TRPO".

sampled      -(pi / pi_old) A + beta KL(pi || ref)
in full      -E_pi[R] + beta KL(pi || ref),   minimised by pi* = ref exp(R / beta) / Z
"""

import torch
from torch import Tensor


def _categorical_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    log_pi, log_ref = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits.detach(), -1)
    return (log_pi.exp() * (log_pi - log_ref)).sum(-1)


def kl_penalty_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, logits: Tensor, ref_logits: Tensor, beta: float = 0.1
) -> Tensor:
    """``logp``, ``old_logp``, ``advantages`` of sampled actions; logits [n, actions] over the full support."""
    surrogate = ((logp - old_logp.detach()).exp() * advantages).mean()
    return beta * _categorical_kl(logits, ref_logits).mean() - surrogate


def kl_regularized_loss(logits: Tensor, ref_logits: Tensor, rewards: Tensor, beta: float = 0.1) -> Tensor:
    """The objective of KL-regularised RL in closed form; all [n, actions] over the full support."""
    value = (torch.softmax(logits, -1) * rewards).sum(-1)
    return (beta * _categorical_kl(logits, ref_logits) - value).mean()
