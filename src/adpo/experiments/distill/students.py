"""Students, all runs as one stack: MLPs with two tanh layers; they give a Gaussian before the squash."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adpo.experiments.distill.actor import Gaussian
from adpo.experiments.stacked import Weights, outputs

LOG_STD = (-5.0, 2.0)
LEAK = 0.1
"""Slope beyond these bounds: a student that was thrown there comes back."""


def initial(states: int, actions: int, hidden: int, seeds: Sequence[int]) -> Weights:
    """Uniform in ±1/sqrt(fan_in), each run from its own seed; outputs near zero: a standard deviation of one."""
    sizes = (states, hidden, hidden, 2 * actions)
    weights: list[list[Tensor]] = []
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        of_run = []
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            bound = (0.01 if layer == 2 else 1.0) / math.sqrt(fan_in)
            drawn = [torch.rand(rows, fan_out, generator=draw) for rows in (fan_in, 1)]
            of_run += [bound * (2 * values - 1) for values in drawn]
        weights.append(of_run)
    return [torch.stack(parts) for parts in zip(*weights, strict=True)]


def policy(weights: Weights, states: Tensor) -> Gaussian:
    """For states ``[runs, n, states]``: mean and log_std, ``[runs, n, actions]``."""
    mean, log_std = outputs(weights, states).chunk(2, -1)
    inside = log_std.clamp(*LOG_STD)
    return Gaussian(mean, inside + LEAK * (log_std - inside))


def on_raw_states(weights: Weights, shift: Tensor, scale: Tensor) -> Weights:
    """The same students, trained on ``(states - shift) / scale``, for states as they are."""
    matrix, bias = weights[0] / scale.unsqueeze(-1), weights[1]
    return [matrix, bias - (shift @ matrix).unsqueeze(1), *weights[2:]]


def averaged(slow: Weights, weights: Weights, decay: float) -> None:
    """``slow`` moves towards the weights."""
    with torch.no_grad():
        torch._foreach_lerp_(slow, weights, 1 - decay)


def save(weights: Weights, path: Path) -> None:
    """As a file that is there whole, or not at all."""
    part = path.with_suffix(".part")
    save_file({str(number): value.contiguous() for number, value in enumerate(weights)}, part)
    part.replace(path)


def load(path: Path) -> Weights:
    """What `save` wrote."""
    found = load_file(path)
    return [found[str(number)] for number in range(len(found))]
