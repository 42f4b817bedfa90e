"""Worlds and what is drawn from them: one generator per seed and purpose, so that a run's data never depend on
which other runs are trained beside it.

A replica is a scenario and a seed. Replicas with the same seed share their world, contexts, lists and noise
draws; only the corruption differs. Tensors are stacked over replicas, scenario by scenario, seeds within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from adpo.experiments.bandits.protocol import Protocol, Scenario


class Draws(NamedTuple):
    """The randomness of one iteration; stacked over replicas, [replicas, contexts, ...]."""

    contexts: Tensor  # [.., dimensions], as the learner sees them
    items: Tensor  # [.., listed], distinct, uniform
    gumbel: Tensor  # [.., listed, items]: adding log-probabilities and taking the argmax samples the policy
    normal: Tensor  # [.., listed]
    outlier: Tensor  # [.., listed], uniform in [0, 1)
    flip: Tensor  # [..], uniform in [0, 1)
    cauchy: Tensor  # [.., listed], standard Cauchy


@dataclass(frozen=True)
class Replica:
    """One scenario under one seed."""

    scenario: Scenario
    seed: int


class Worlds:
    """The reward functions of several replicas, and the draws they give."""

    def __init__(self, protocol: Protocol, replicas: Sequence[Replica]) -> None:
        self.protocol, self.replicas = protocol, list(replicas)
        self.seeds = sorted({replica.seed for replica in replicas})
        self._slot = torch.tensor([self.seeds.index(replica.seed) for replica in replicas])
        worlds = [_world(protocol, seed) for seed in self.seeds]
        self._hidden, self._output, self._direction = (torch.stack(parts) for parts in zip(*worlds, strict=True))
        self._generators = {seed: _generator(seed, "train") for seed in self.seeds}
        names = ("noise", "outliers", "shift", "scale", "flips", "cauchy")
        levels = {name: [float(getattr(replica.scenario, name)) for replica in replicas] for name in names}
        self._levels = {name: torch.tensor(values).view(-1, 1, 1) for name, values in levels.items()}

    def clean_rewards(self, contexts: Tensor) -> Tensor:
        """[replicas, n, items] for contexts [replicas, n, dimensions]."""
        hidden, output = self._hidden[self._slot], self._output[self._slot]
        return torch.tanh(contexts @ hidden) @ output

    def draw(self) -> Draws:
        """The next iteration's randomness."""
        return self._stacked(self._generators, self.protocol.contexts)

    def held_out(self) -> Draws:
        """Lists of the training distribution that are never trained on."""
        return self._stacked(
            {seed: _generator(seed, "held-out") for seed in self.seeds}, self.protocol.held_out_lists
        )

    def test_contexts(self) -> Tensor:
        """Clean, unshifted contexts, [replicas, test_contexts, dimensions]."""
        size = (self.protocol.test_contexts, self.protocol.dimensions)
        drawn = [torch.randn(size, generator=_generator(seed, "test")) for seed in self.seeds]
        return torch.stack(drawn)[self._slot]

    def reference_contexts(self, step: int) -> Tensor:
        """Clean contexts for the pre-training of the reference policy."""
        size = (self.protocol.contexts, self.protocol.dimensions)
        drawn = [torch.randn(size, generator=_generator(seed, f"reference {step}")) for seed in self.seeds]
        return torch.stack(drawn)[self._slot]

    def initial(self, shape: tuple[int, ...], name: str) -> Tensor:
        """Uniform in [-1, 1), the same for every run of a seed, [replicas, *shape]."""
        drawn = [torch.rand(shape, generator=_generator(seed, name)) * 2 - 1 for seed in self.seeds]
        return torch.stack(drawn)[self._slot]

    def observed(self, draws: Draws, items: Tensor) -> Tensor:
        """Corrupted rewards of ``items`` [..., replicas, contexts, listed]; leading axes are methods."""
        clean = self.clean_rewards(draws.contexts).expand(*items.shape[:-1], self.protocol.items).gather(-1, items)
        level = self._levels
        spread = torch.where(draws.outlier < level["outliers"], 10.0, 1.0) * level["noise"]
        sign = torch.where(draws.flip.unsqueeze(-1) < level["flips"], -1.0, 1.0)
        return sign * (clean + spread * draws.normal + level["cauchy"] * draws.cauchy)

    def _stacked(self, generators: dict[int, torch.Generator], contexts: int) -> Draws:
        drawn = [_draw(self.protocol, generators[seed], contexts) for seed in self.seeds]
        stacked = Draws(*(torch.stack(parts)[self._slot] for parts in zip(*drawn, strict=True)))
        shift = self._levels["shift"] * self._direction[self._slot].unsqueeze(1)
        return stacked._replace(contexts=self._levels["scale"] * stacked.contexts + shift)


def _generator(seed: int, purpose: str) -> torch.Generator:
    # A fixed mixing of seed and purpose (the built-in hash differs between processes).
    mixed = seed
    for character in purpose:
        mixed = (mixed * 1_000_003 + ord(character)) % (2**61 - 1)
    return torch.Generator().manual_seed(mixed)


def _world(protocol: Protocol, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reward function with unit variance over contexts and items, and the direction of a shift."""
    generator = _generator(seed, "world")
    hidden = torch.randn(protocol.dimensions, protocol.world_units, generator=generator) / protocol.dimensions**0.5
    output = torch.randn(protocol.world_units, protocol.items, generator=generator)
    sample = torch.tanh(torch.randn(4000, protocol.dimensions, generator=generator) @ hidden) @ output
    direction = torch.randn(protocol.dimensions, generator=generator)
    return hidden, output / sample.std(), direction / direction.norm()


def _draw(protocol: Protocol, generator: torch.Generator, contexts: int) -> Draws:
    def uniform(*shape: int) -> Tensor:
        return torch.rand(contexts, *shape, generator=generator)

    listed, items = protocol.listed, protocol.items
    tiny = torch.finfo(torch.float32).tiny
    return Draws(
        contexts=torch.randn(contexts, protocol.dimensions, generator=generator),
        items=uniform(items).argsort(-1)[:, :listed],
        gumbel=-(-uniform(listed, items).clamp(min=tiny).log()).clamp(min=tiny).log(),
        normal=torch.randn(contexts, listed, generator=generator),
        outlier=uniform(listed),
        flip=uniform(),
        cauchy=torch.tan(torch.pi * (uniform(listed) - 0.5)),
    )
