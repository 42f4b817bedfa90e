"""Schedules of the anchoring temperature tau: ``update(entropy=..., reward=...) -> tau``.

``entropy`` is a normalised entropy in [0, 1] and the caller's choice of signal: of the policy over the items,
of the final answers inside a group, of tokens. (The entropy of ``softmax(u)`` will not do with an on-policy
anchor: there u = 0 and it is always 1.) ``reward`` is a mean reward. Numbers give a number; a ``[groups]``
tensor for either gives one tau per group. State lives in ``state_dict``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from adpo.core.groups import positive

Scalars = float | Tensor


class Temperature(Protocol):
    """A schedule of tau; without state unless it says so."""

    def update(self, *, entropy: Scalars, reward: Scalars) -> Scalars: ...

    def state_dict(self) -> dict[str, float | int]:
        return {}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        expected = sorted(self.state_dict())
        if sorted(state) != expected:
            raise ValueError(f"temperature state must hold {expected}; got {sorted(state)}")


@dataclass
class ConstantTau(Temperature):
    """Always the same tau.

    >>> ConstantTau(0.8).update(entropy=0.5, reward=1.0)
    0.8
    """

    tau: float = 1.0

    def __post_init__(self) -> None:
        positive("tau", self.tau)

    def update(self, *, entropy: Scalars, reward: Scalars) -> float:  # noqa: ARG002
        return self.tau


class GuardedTau(Temperature):
    """Relaxed only when the policy is both confident and improving.

        tau = tau_max - (tau_max - tau_min) c p,   c = 1 - entropy,   p = max(0, tanh((reward - b) / s))

    b is a moving average of the batch's mean reward *before* this update, s a running standard deviation of the
    mean reward around b (corrected for its short history, floored at ``std_floor``). The first update has no
    baseline and the second no deviation to measure by: p = 0. When the reward no longer changes the guard closes,
    by design; noise around a level opens it by chance, for a part of the updates.

    ``opens_to`` says where an open guard leads. "tau_min" is the formula as printed: smaller tau, larger steps
    away from u = 0, though an optimum closer to the anchor. "tau_max" exchanges the two ends.

    >>> schedule = GuardedTau(tau_min=0.5, tau_max=2.0)
    >>> [round(schedule.update(entropy=0.2, reward=reward), 2) for reward in (0.0, 0.1, 0.5)]
    [2.0, 2.0, 0.8]
    """

    def __init__(
        self,
        tau_min: float = 0.5,
        tau_max: float = 2.0,
        *,
        opens_to: Literal["tau_min", "tau_max"] = "tau_min",
        baseline_decay: float = 0.9,
        std_floor: float = 1e-3,
    ) -> None:
        _check_bounds(tau_min, tau_max)
        if opens_to not in ("tau_min", "tau_max"):
            raise ValueError(f'opens_to must be "tau_min" or "tau_max"; got {opens_to!r}')
        if not 0 <= baseline_decay < 1:
            raise ValueError(f"baseline_decay must be in [0, 1); got {baseline_decay}")
        self.tau_min, self.tau_max, self.opens_to = tau_min, tau_max, opens_to
        self.baseline_decay, self.std_floor = baseline_decay, positive("std_floor", std_floor)
        self.baseline, self.variance, self.updates = 0.0, 0.0, 0

    def update(self, *, entropy: Scalars, reward: Scalars) -> Scalars:
        confidence = 1 - _checked_entropy(entropy)
        improvement = self._improvement(_checked_reward(reward))
        self._observe(float(reward.detach().double().mean()) if isinstance(reward, Tensor) else float(reward))
        guard = confidence * improvement
        closed, opened = self.tau_max, self.tau_min
        if self.opens_to == "tau_max":
            closed, opened = opened, closed
        return closed + (opened - closed) * guard

    def _improvement(self, reward: Scalars) -> Scalars:
        if self.updates < 2:
            return torch.zeros_like(reward) if isinstance(reward, Tensor) else 0.0
        variance = self.variance / (1 - self.baseline_decay ** (self.updates - 1))
        gain = (reward - self.baseline) / max(math.sqrt(variance), self.std_floor)
        return torch.tanh(gain).clamp(min=0) if isinstance(gain, Tensor) else max(0.0, math.tanh(gain))

    def _observe(self, mean_reward: float) -> None:
        if self.updates == 0:
            self.baseline = mean_reward
        surprise, keep = mean_reward - self.baseline, self.baseline_decay
        self.variance = keep * self.variance + (1 - keep) * surprise**2
        self.baseline += (1 - keep) * surprise
        self.updates += 1

    def state_dict(self) -> dict[str, float | int]:
        return {"baseline": self.baseline, "variance": self.variance, "updates": self.updates}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        super().load_state_dict(state)
        self.baseline, self.variance = float(state["baseline"]), float(state["variance"])
        self.updates = int(state["updates"])


@dataclass
class HybridTau(Temperature):
    """The entropy/reward schedule of the paper's language-model runs, without state.

    tau = tau_base (1 + entropy_weight H + reward_weight (1 - H) (1 - R)), clamped to [tau_min, tau_max]

    >>> HybridTau(tau_base=1.0).update(entropy=1.0, reward=0.0)
    1.2
    """

    tau_base: float = 0.8
    entropy_weight: float = 0.2
    reward_weight: float = 0.5
    tau_min: float = 0.1
    tau_max: float = 10.0

    def __post_init__(self) -> None:
        positive("tau_base", self.tau_base)
        _check_bounds(self.tau_min, self.tau_max)

    def update(self, *, entropy: Scalars, reward: Scalars) -> Scalars:
        h, r = _checked_entropy(entropy), _checked_reward(reward)
        tau = self.tau_base * (1 + self.entropy_weight * h + self.reward_weight * (1 - h) * (1 - r))
        if isinstance(tau, Tensor):
            return tau.clamp(self.tau_min, self.tau_max)
        return min(max(tau, self.tau_min), self.tau_max)


def _check_bounds(tau_min: float, tau_max: float) -> None:
    if positive("tau_min", tau_min) > positive("tau_max", tau_max):
        raise ValueError(f"tau_min must not exceed tau_max; got {tau_min} and {tau_max}")


def _checked_entropy(entropy: Scalars) -> Scalars:
    # Rounding may carry a normalised entropy a hair outside [0, 1].
    if not _everywhere(entropy, -1e-6, 1 + 1e-6):
        raise ValueError(f"entropy must be normalised to [0, 1]; got {entropy}")
    return entropy.detach().clamp(0, 1) if isinstance(entropy, Tensor) else min(max(entropy, 0.0), 1.0)


def _checked_reward(reward: Scalars) -> Scalars:
    if not _everywhere(reward, -math.inf, math.inf):
        raise ValueError(f"reward must be finite; got {reward}")
    if isinstance(reward, Tensor):
        reward = reward.detach()
        return reward if reward.is_floating_point() else reward.double()
    return reward


def _everywhere(value: Scalars, low: float, high: float) -> bool:
    if isinstance(value, Tensor):
        return bool((torch.isfinite(value) & (value >= low) & (value <= high)).all())
    return math.isfinite(value) and low <= value <= high
