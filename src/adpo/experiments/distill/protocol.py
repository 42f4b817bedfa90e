"""The protocol: every number of the experiment.

A teacher acts with its noise; the states it comes through, whole episodes of them, are the lessons. Students of
every method start from the same weights, see the same states in the same order, and are examined in the same
episodes as their teacher, with their noise and without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from adpo.experiments.distill.learning import Course
from adpo.experiments.distill.methods import methods

THOROUGH = Course(steps=16_000, batch=256, hidden=256, learning_rate=2e-3)
QUICK = Course(steps=3000)
COMPARED = ("KD, candidates", "KD, closed form", "ADPO anchored target", "ADPO anchored target EMA")
"""Methods of the studies beside the main one, which has all."""
SEEDS_FROM = 100
"""Of students; teachers have others."""
STUDIES = {
    "states": "states of the teacher",
    "steps": "gradient steps",
    "noise": "noise of the teacher's labels, in its standard deviations",
    "wrong": "share of states with the label of another",
    "small": "hidden units of the student",
}
"""What the studies beside the main one change."""


@dataclass(frozen=True)
class Lesson:
    """What a study changes about the lessons and the student."""

    study: str = "main"
    states: int = 100_000
    noise: float = 0.0  # of the teacher's means, in its standard deviations
    wrong: float = 0.0  # share of states with the lesson of another
    course: Course = THOROUGH

    @property
    def name(self) -> str:
        course = self.course
        return (
            f"{self.study}-states{self.states}-noise{self.noise:g}-wrong{self.wrong:g}"
            f"-hidden{course.hidden}-steps{course.steps}"
        )


@dataclass(frozen=True)
class Protocol:
    """One run of the experiment."""

    environments: tuple[str, ...] = ("HalfCheetah-v5", "Hopper-v5")
    seeds: int = 10
    first_seed: int = SEEDS_FROM
    episodes: int = 20
    held_out: int = 4000  # states of other episodes, for distances
    recorded: int = 106_000
    main: Lesson = Lesson()
    beside: Lesson = Lesson("beside", states=20_000, course=QUICK)
    """What the other studies change one thing of: less of everything, as where a method has to show itself."""
    few_states: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    few_steps: tuple[int, ...] = (30, 100, 300, 1000, 3000, 10_000, 30_000)
    noises: tuple[float, ...] = (1.0, 2.0)
    shares_wrong: tuple[float, ...] = (0.1, 0.3)
    small: tuple[int, ...] = (8, 16)
    curve_episodes: int = 5
    dagger: int = 0  # rounds in which students act and the teacher says what it would have done

    def lessons(self) -> Iterator[Lesson]:
        """The main study; then, one change at a time, what is beside it."""
        base = self.beside
        yield self.main
        for steps in self.few_steps:  # each with a schedule of its own
            yield replace(base, study="steps", course=replace(base.course, steps=steps))
        for states in self.few_states:
            yield replace(base, study="states", states=states)
        for noise in self.noises:
            yield replace(base, study="noise", noise=noise)
        for wrong in self.shares_wrong:
            yield replace(base, study="wrong", wrong=wrong)
        for hidden in self.small:
            yield replace(base, study="small", course=replace(base.course, hidden=hidden))

    def methods(self, lesson: Lesson) -> tuple[str, ...]:
        """All in the main study, those that are compared beside it."""
        return tuple(methods()) if lesson == self.main else COMPARED

    def described(self) -> dict[str, Any]:
        """What results depend on; the usual first seed is not told, as earlier jobs do not have it."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("first_seed", SEEDS_FROM)}


PRESETS = {
    "paper": Protocol(),
    "smoke": Protocol(
        environments=("Hopper-v5",),
        seeds=2,
        episodes=2,
        held_out=400,
        recorded=1600,
        main=Lesson(states=1000, course=Course(steps=100)),
        beside=Lesson("beside", states=1000, course=Course(steps=100)),
        few_states=(100,),
        few_steps=(30, 100),
        noises=(),
        shares_wrong=(),
        small=(8,),
        curve_episodes=1,
    ),
}
