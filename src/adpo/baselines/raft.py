"""Reward-ranked fine-tuning (Dong et al. 2023): the likelihood of the best candidate of each group."""

from torch import Tensor


def raft_loss(logp: Tensor, rewards: Tensor) -> Tensor:
    """``logp``, ``rewards`` [groups, K]; the first of tied winners counts."""
    return -logp.gather(-1, rewards.argmax(-1, keepdim=True)).mean()
