"""How good students are: what they earn, and how close they are to their teacher where it has not shown them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adpo.experiments.distill import students, worlds
from adpo.experiments.distill.actor import Gaussian
from adpo.experiments.distill.learning import Course, drawn_candidates
from adpo.experiments.distill.lessons import Lessons
from adpo.experiments.stacked import Weights

Policies = Callable[[Tensor], Gaussian]
"""States ``[runs, n, states]`` to what is done there."""


class Closeness(NamedTuple):
    """Means over states, ``[runs]``."""

    kl: Tensor  # KL(teacher || student)
    reverse_kl: Tensor  # KL(student || teacher)
    ndcg: Tensor  # of the student's order of candidates, by the teacher's probabilities
    std: Tensor  # of the student, before the squash
    teacher_std: Tensor


@torch.no_grad()
def closeness(weights: Weights, lessons: Lessons, course: Course, seed: int = 0) -> Closeness:
    """On the states of some lessons, with candidates as in a course."""
    runs = len(weights[0])
    ours = students.policy(weights, lessons.states.expand(runs, -1, -1))
    theirs = Gaussian(*(part.expand(runs, -1, -1) for part in (lessons.mean, lessons.log_std)))
    candidates = drawn_candidates(course, theirs, ours, torch.Generator().manual_seed(seed))
    scores, gains = (_table(policy, candidates) for policy in (ours, theirs))
    return Closeness(
        theirs.kl(ours).mean(1),
        ours.kl(theirs).mean(1),
        ndcg(scores, gains.softmax(-1)).mean(1),
        ours.log_std.exp().mean((1, 2)),
        theirs.log_std.exp().mean((1, 2)),
    )


def _table(policy: Gaussian, candidates: Tensor) -> Tensor:
    return Gaussian(policy.mean.unsqueeze(-2), policy.log_std.unsqueeze(-2)).logp(candidates)


def ndcg(scores: Tensor, gains: Tensor) -> Tensor:
    """Normalised discounted cumulative gain of an order by ``scores``, over the last axis.

    >>> ndcg(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0.7, 0.2, 0.1])).item()
    1.0
    """
    discount = 1 / torch.log2(torch.arange(scores.shape[-1], device=scores.device) + 2.0)
    found = gains.gather(-1, scores.argsort(-1, descending=True))
    best = gains.sort(-1, descending=True).values
    return (found * discount).sum(-1) / (best * discount).sum(-1)


def earned(name: str, weights: Weights, episodes: int, seed: int, *, noise: bool) -> Tensor:
    """Of every student in the same episodes, ``[runs, episodes]``."""
    runs = len(weights[0])
    return earned_by(name, lambda seen: students.policy(weights, seen), runs, episodes, seed, noise=noise)


@torch.no_grad()
def earned_by(name: str, policies: Policies, runs: int, episodes: int, seed: int, *, noise: bool) -> Tensor:
    """Every policy in a copy of the environment for every episode; the first episode of a copy counts."""
    world = worlds.copies(name, runs * episodes)
    draw = torch.Generator().manual_seed(seed)
    try:
        states, _ = world.reset(seed=[seed + episode for _ in range(runs) for episode in range(episodes)])
        total, running = np.zeros(runs * episodes), np.ones(runs * episodes, dtype=bool)
        while running.any():
            found = policies(torch.from_numpy(states).float().view(runs, episodes, -1))
            u = found.mean
            if noise:  # the same for every policy
                u = found.draw(torch.randn(u.shape[1:], generator=draw))
            actions = torch.tanh(u).view(runs * episodes, -1).numpy()
            states, rewards, ended, cut, _ = world.step(worlds.scaled(world, actions))
            total += rewards * running
            running &= ~(ended | cut)
    finally:
        world.close()
    return torch.from_numpy(total).view(runs, episodes)
