"""A temperature that fits itself to the size of the steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CALIBRATION_ROLLOUTS = 8
"""Where every rollout is used for one step only, measuring costs two passes, and is done for so many rollouts."""


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

    def measure(self, moved: Tensor, groups: Tensor) -> None:
        """``moved`` is ``logp - anchor_logp``, ``[rows]``; what a group has in common does not count."""
        spread = float(_within_groups(moved, groups).std(correction=0)) / self.tau
        if spread > 0:
            self.spread = spread
            self.tau *= min(10.0, max(0.1, spread**0.5))
            self.measured += 1

    def state_dict(self) -> dict[str, float | int]:
        return {"tau": self.tau, "measured": self.measured}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.tau, self.measured = float(state["tau"]), int(state["measured"])


def _within_groups(values: Tensor, groups: Tensor) -> Tensor:
    _, place = torch.unique(groups, return_inverse=True)
    totals = torch.zeros(int(place.max()) + 1, dtype=values.dtype, device=values.device)
    counts = totals.index_add(0, place, torch.ones_like(values))
    return values - (totals.index_add(0, place, values) / counts)[place]
