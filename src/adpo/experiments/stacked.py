"""Many small networks trained as one: the weights of all runs stacked along a first axis.

Runs never mix: matrix products are batched over the run axis, AdamW is elementwise, so each run goes its own way
to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adpo.core.temperature import GuardedTau

Weights = list[Tensor]
"""Matrices and biases in turn, each ``[runs, fan_in, fan_out]`` or ``[runs, 1, fan_out]``."""


def outputs(weights: Weights, inputs: Tensor, activation: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
    """Of the last layer, ``[runs, n, fan_out]``, for inputs ``[runs, n, fan_in]``."""
    hidden = inputs
    for matrix, bias in zip(weights[0:-2:2], weights[1:-2:2], strict=True):
        hidden = activation(torch.baddbmm(bias, hidden, matrix))
    return torch.baddbmm(weights[-1], hidden, weights[-2])


def guarded_taus(guards: Sequence[GuardedTau], entropies: Tensor, rewards: Tensor) -> Tensor:
    """The next temperature of every run, ``[runs]``, from its entropy and reward."""
    by_run = zip(guards, entropies.tolist(), rewards.tolist(), strict=True)
    taus = [float(guard.update(entropy=entropy, reward=reward)) for guard, entropy, reward in by_run]
    return torch.tensor(taus, dtype=torch.float64, device=entropies.device)
