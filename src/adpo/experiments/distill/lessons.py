"""What students learn from: states that a teacher came through, and what it did there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from adpo.experiments.distill import worlds
from adpo.experiments.distill.actor import Gaussian


class Lessons(NamedTuple):
    """By state: the teacher's policy there and what it did, before the squash."""

    states: Tensor  # [n, states]
    mean: Tensor  # [n, actions]
    log_std: Tensor  # [n, actions]
    shown: Tensor  # [n, actions]
    episode: Tensor  # [n]

    def teacher(self, places: Tensor) -> Gaussian:
        """What the lessons say of the teacher."""
        return Gaussian(self.mean[places], self.log_std[places])

    def to(self, device: torch.device) -> Lessons:
        return Lessons(*(part.to(device) for part in self))

    def save(self, path: Path) -> None:
        """As a file that is there whole, or not at all."""
        part = path.with_suffix(".part")
        save_file({name: value.contiguous() for name, value in self._asdict().items()}, part)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Lessons:
        try:
            return cls(**load_file(path))
        except (OSError, TypeError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read ({error}): choose another --out") from None

    def first(self, count: int) -> Lessons:
        """So many of the states."""
        if count > len(self.states):
            raise ValueError(f"{count} states were asked for; there are {len(self.states)}")
        return Lessons(*(part[:count] for part in self))

    def corrupted(self, noise: float, wrong: float, seed: int) -> Lessons:
        """Means off by so many standard deviations of the teacher, and a share of states with another's lesson."""
        draw = torch.Generator().manual_seed(seed)
        off = torch.randn(self.mean.shape, generator=draw) * self.log_std.exp()
        swapped = torch.rand(len(self.states), generator=draw) < wrong
        other = torch.where(
            swapped, torch.randperm(len(self.states), generator=draw), torch.arange(len(self.states))
        )
        parts = (part[other] for part in (self.mean + noise * off, self.log_std, self.shown + noise * off))
        mean, log_std, shown = parts
        return Lessons(self.states, mean, log_std, shown, self.episode)

    def joined(self, other: Lessons) -> Lessons:
        """These, and then the others, as later episodes."""
        later = other._replace(episode=other.episode + int(self.episode.max()) + 1)
        return Lessons(*(torch.cat(parts) for parts in zip(self, later, strict=True)))

    def split(self, held_out: int) -> tuple[Lessons, Lessons]:
        """Whole episodes apart, the last ones held out: at least so many states."""
        sizes = torch.bincount(self.episode)
        from_the_end = sizes.flip(0).cumsum(0)
        episodes = int((from_the_end < held_out).sum()) + 1
        out = self.episode >= len(sizes) - episodes
        if out.all():
            raise ValueError(f"{len(sizes)} episodes cannot be split with {held_out} states held out: record more")
        return Lessons(*(part[~out] for part in self)), Lessons(*(part[out] for part in self))


Policy = Callable[[Tensor], Gaussian]


@torch.no_grad()
def record(
    teacher: Policy, name: str, count: int, seed: int, acting: Policy | None = None, side_by_side: int = 32
) -> Lessons:
    """Of episodes in which the teacher acts with its noise; those that have not ended are left out.

    Where another policy acts (``acting``, as in DAgger), the teacher is asked what it would have done.
    """
    world = worlds.copies(name, side_by_side)
    draw = torch.Generator().manual_seed(seed)
    finished: list[tuple[list[Tensor], list[Tensor]]] = []
    running: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(side_by_side)]
    try:
        states, _ = world.reset(seed=seed)
        while sum(len(seen) for seen, _ in finished) < count:
            seen = torch.from_numpy(states).float()
            policy = (acting or teacher)(seen)
            u = policy.draw(torch.randn(policy.mean.shape, generator=draw))
            states, _, ended, cut, _ = world.step(worlds.scaled(world, torch.tanh(u).numpy()))
            for number, (of_copy, done) in enumerate(running):
                of_copy.append(seen[number])
                done.append(u[number])
            for number in np.flatnonzero(ended | cut).tolist():
                finished.append(running[number])
                running[number] = ([], [])
    finally:
        world.close()
    lengths = torch.tensor([len(seen) for seen, _ in finished])
    states_of, shown = (torch.cat([torch.stack(part[place]) for part in finished]) for place in (0, 1))
    said = teacher(states_of)
    if acting is not None:
        shown = said.draw(torch.randn(said.mean.shape, generator=draw))
    episode = torch.repeat_interleave(torch.arange(len(finished)), lengths)
    return Lessons(states_of, said.mean, said.log_std, shown, episode)
