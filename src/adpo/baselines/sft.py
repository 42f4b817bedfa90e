"""Supervised fine-tuning: ``-log pi(label)``."""

import torch
from torch import Tensor


def sft_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """``logits`` [n, actions] over the full support, ``labels`` [n]."""
    return -torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).mean()
