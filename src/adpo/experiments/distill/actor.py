"""A policy over actions: a Gaussian, squashed by tanh into the bounds of the action space.

Everything is written before the squash: ``u`` is drawn from a Gaussian, ``tanh(u)`` acts. Log-probabilities of two
policies at the same ``u`` differ by the same amount before and after the squash, which has no parameters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import softplus

LOG_STD = (-20.0, 2.0)
"""Between these the logarithm of the standard deviation is kept."""


class Gaussian(NamedTuple):
    """Independent components on the last axis, before the squash."""

    mean: Tensor
    log_std: Tensor

    def draw(self, noise: Tensor) -> Tensor:
        """``noise`` is standard normal."""
        return self.mean + self.log_std.exp() * noise

    def logp(self, u: Tensor) -> Tensor:
        """Density of ``u``, summed over the last axis."""
        return self.standard_logp(u) - 0.5 * math.log(2 * math.pi) * u.shape[-1]

    def standard_logp(self, u: Tensor) -> Tensor:
        """The same without the constant."""
        z = (u - self.mean) * (-self.log_std).exp()
        return -(0.5 * z.square() + self.log_std).sum(-1)

    def squashed_logp(self, u: Tensor) -> Tensor:
        """Density of ``tanh(u)``."""
        return self.logp(u) - 2 * (math.log(2) - u - softplus(-2 * u)).sum(-1)

    def kl(self, other: Gaussian) -> Tensor:
        """``KL(self || other)``, the same before and after the squash."""
        ratio = 2 * (self.log_std - other.log_std)
        apart = ((self.mean - other.mean) * (-other.log_std).exp()).square()
        return 0.5 * (ratio.exp() + apart - 1 - ratio).sum(-1)


class Actor(nn.Module):
    """Two hidden layers; mean and logarithm of the standard deviation for every state.

    Layers are rectifiers, or, ``smooth``, tanh on states that are scaled.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, states: int, actions: int, hidden: int = 256, smooth: bool = False) -> None:
        super().__init__()
        self.sizes: dict[str, Any] = {"states": states, "actions": actions, "hidden": hidden, "smooth": smooth}
        self.smooth = smooth
        if smooth:
            self.register_buffer("shift", torch.zeros(states))
            self.register_buffer("scale", torch.ones(states))
        bend: type[nn.Module] = nn.Tanh if smooth else nn.ReLU
        self.body = nn.Sequential(nn.Linear(states, hidden), bend(), nn.Linear(hidden, hidden), bend())
        self.mean, self.log_std = nn.Linear(hidden, actions), nn.Linear(hidden, actions)

    def scale_states(self, seen: Tensor) -> None:
        """By the mean and the spread of states that were seen; once, before anything is learnt."""
        self.shift.copy_(seen.mean(0))
        self.scale.copy_(seen.std(0).clamp(min=0.1))

    def forward(self, states: Tensor) -> Gaussian:
        hidden = self.body((states - self.shift) / self.scale if self.smooth else states)
        return Gaussian(self.mean(hidden), self.log_std(hidden).clamp(*LOG_STD))


def save_actor(actor: Actor, path: Path, card: dict[str, object]) -> None:
    """Weights, with their sizes and what is known of them."""
    weights = {name: value.detach().cpu().contiguous() for name, value in actor.state_dict().items()}
    save_file(weights, path, {"sizes": json.dumps(actor.sizes), "card": json.dumps(card)})


def load_actor(path: Path) -> tuple[Actor, dict[str, object]]:
    """As it was saved, and its card."""
    try:
        with safe_open(path, "pt") as file:
            known = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        actor = Actor(**json.loads(known["sizes"]))
        actor.load_state_dict(weights)
        card: dict[str, object] = json.loads(known["card"])
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} holds no actor: {reason}") from None
    return actor.requires_grad_(requires_grad=False), card


def deterministic(actor: Actor, states: Tensor) -> Tensor:
    """The action in the middle."""
    return torch.tanh(actor(states).mean)
