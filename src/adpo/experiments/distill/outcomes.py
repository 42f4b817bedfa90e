"""What becomes of the students of one method in one study: the cells of the experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from adpo.experiments.distill import measures, students
from adpo.experiments.distill.actor import Actor, Gaussian
from adpo.experiments.distill.learning import taught
from adpo.experiments.distill.lessons import Lessons, record
from adpo.experiments.distill.methods import methods
from adpo.experiments.distill.protocol import Lesson, Protocol
from adpo.experiments.seeds import seeds_from
from adpo.experiments.stacked import Weights

RECORDING_SEED = 7
CORRUPTION_SEED = 11
DAGGER_SEED = 10**5
EPISODE_SEED = 3 * 10**6
"""Of the exams: the first states of episodes, and the noise in them."""


def recorded(teacher: Actor, name: str, protocol: Protocol) -> Lessons:
    """What the teacher shows to all students, and some more."""
    return record(teacher, name, protocol.recorded, RECORDING_SEED)


def outcome(
    name: str,
    method: str,
    lesson: Lesson,
    protocol: Protocol,
    teacher: Actor,
    practice: Lessons,
    held_out: Lessons,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Of all seeds of a method; the first student's weights can be kept in a file."""
    given = practice.first(lesson.states).corrupted(lesson.noise, lesson.wrong, CORRUPTION_SEED)
    main = lesson == protocol.main
    seeds = seeds_from(protocol.first_seed, protocol.seeds)
    course = lesson.course
    weights = taught(methods()[method], course, given, seeds)
    for number in range(protocol.dagger):
        given = given.joined(visited(teacher, name, weights, lesson.states, DAGGER_SEED + number))
        weights = taught(methods()[method], course, given, seeds)
    if keep is not None:
        students.save([value[:1] for value in weights], keep)
    episodes = protocol.episodes if main else protocol.curve_episodes
    return examined(name, weights, episodes, held_out, lesson)


def visited(teacher: Actor, name: str, weights: Weights, count: int, seed: int) -> Lessons:
    """States that students come through, each in its own world, and what the teacher would have done there."""

    def acting(states: torch.Tensor) -> Gaussian:
        return Gaussian(*(part.squeeze(1) for part in students.policy(weights, states.unsqueeze(1))))

    return record(teacher, name, count, seed, acting, side_by_side=len(weights[0]))


def examined(name: str, weights: Weights, episodes: int, held_out: Lessons, lesson: Lesson) -> dict[str, Any]:
    """Lists over seeds: distances on states held out, and the mean return with noise and without."""
    close = measures.closeness(weights, held_out, lesson.course)
    found: dict[str, Any] = {key: _rounded(values) for key, values in close._asdict().items()}
    for way, noise in (("deterministic", False), ("stochastic", True)):
        earned = measures.earned(name, weights, episodes, EPISODE_SEED, noise=noise)
        found[way] = _rounded(earned.mean(1))
    return found


def teachers_own(name: str, teacher: Actor, protocol: Protocol) -> dict[str, list[float]]:
    """What the teacher earns in the episodes of the main exam, one number each."""
    found = {}
    for way, noise in (("deterministic", False), ("stochastic", True)):
        earned = measures.earned_by(
            name, lambda seen: teacher(seen), 1, protocol.episodes, EPISODE_SEED, noise=noise
        )
        found[way] = _rounded(earned[0])
    return found


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.7g}") for value in values.tolist()]
