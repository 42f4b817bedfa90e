"""A temperature that fits itself to the size of the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CALIBRATION_ROLLOUTS = 8
"""Where every rollout is used for one step only, measuring costs two passes, and is done for so many rollouts."""
NEAR_PEAK = 0.5
"""Steps count that have at least this share of the highest learning rate; with it goes how far they move."""
ROUNDING = 1e-5
"""Moves below this share of the log-probabilities are not told from rounding, and not measured."""


class AutoTau:
    """Makes the standard deviation of u after the first step on a rollout about 1.

    With log-probabilities summed over a completion, one step may move ``logp - anchor_logp`` by tens, and by how
    much depends on model, length and learning rate. After each measurement ``tau <- tau * sqrt(std(u))``: the root
    because the size of a step may itself go as 1 / tau (plain gradient descent) or not (Adam); it converges for
    both.
    """

    def __init__(self, tau: float = 1.0) -> None:
        self.tau, self.measured, self.spread = tau, 0, float("nan")

    def update(self, **_: Any) -> float:
        return self.tau

    def measure(self, moved: Tensor, groups: Tensor, anchor_logp: Tensor, rate: float = 1.0) -> bool:
        """Whether there was something to measure in ``moved``, ``logp - anchor_logp``, ``[rows]``.

        What a group has in common does not count. ``rate`` is the step's learning rate as a share of the highest,
        where that step stands for all.
        """
        move = float(_within_groups(moved, groups).std(correction=0))
        if not move > ROUNDING * float(anchor_logp.abs().mean()):
            return False
        self.spread = move / rate / self.tau
        self.tau *= min(10.0, max(0.1, self.spread**0.5))
        self.measured += 1
        return True

    def state_dict(self) -> dict[str, float | int]:
        return {"tau": self.tau, "measured": self.measured}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.tau, self.measured = float(state["tau"]), int(state["measured"])


def rate_of(optimizer: Any) -> float:
    """The learning rate of the step at hand, as a share of the highest of its schedule."""
    group = optimizer.param_groups[0]
    highest = float(group.get("initial_lr", group["lr"]))
    return float(group["lr"]) / highest if highest else 0.0


def _within_groups(values: Tensor, groups: Tensor) -> Tensor:
    _, place = torch.unique(groups, return_inverse=True)
    totals = torch.zeros(int(place.max()) + 1, dtype=values.dtype, device=values.device)
    counts = totals.index_add(0, place, torch.ones_like(values))
    return values - (totals.index_add(0, place, values) / counts)[place]
