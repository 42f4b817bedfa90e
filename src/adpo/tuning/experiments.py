"""Jobs that are no commands of their own: learners of the experiments, tried out in this process.

They learn and are examined where the reported runs are not: in other worlds, other episodes, on watched problems.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from adpo.files import write_json
from adpo.training.keys import parse_pairs
from adpo.tuning.spaces import CLIPS, RATES, TAU, Range
from adpo.tuning.trials import Look, Outcome

SCORE = "score.json"


@dataclass(frozen=True)
class Experiment(ABC):
    """``words``: options of the job, and settings that have been chosen already."""

    words: tuple[str, ...]
    seed: int
    name: ClassVar[str]
    measure: ClassVar[str]
    options: ClassVar[dict[str, Any]]  # and what they are by themselves

    @cached_property
    def given(self) -> dict[str, Any]:
        """Options as they are for this job."""
        typed = parse_pairs(self.words)
        return {name: _like(usual, typed.get(name, usual), name) for name, usual in self.options.items()}

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Settings that are not to be tried: what is typed and is no option."""
        return {name: value for name, value in parse_pairs(self.words).items() if name not in self.options}

    def one_of(self, option: str, names: Sequence[str]) -> str:
        """The option, which has to be among them."""
        name = str(self.given[option])
        if name not in names:
            raise ValueError(f"--{option} {name}: expected one of {', '.join(names)}")
        return name

    def space(self) -> dict[str, Range]:
        """What there is to choose, less what has been chosen."""
        return {name: bounds for name, bounds in self.ranges().items() if name not in self.chosen}

    def with_seed(self, seed: int) -> Experiment:
        return replace(self, seed=seed)

    def checked(self, _: Path, values: Mapping[str, float]) -> None:
        known = self.usual()
        self.ready()
        for name in {**self.chosen, **values}:
            if name not in known:
                raise ValueError(f"{self.name}: there is no setting {name}: expected some of {', '.join(known)}")

    def carried_out(self, folder: Path, values: Mapping[str, float], look: Look) -> Outcome:
        settings = {name: _like(usual, self.chosen.get(name, usual), name) for name, usual in self.usual().items()}
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)  # small matrices gain nothing from more
        scores = self.scores(folder, {**settings, **values})
        score = sum(scores) / len(scores)
        write_json(folder / SCORE, {"settings": {**settings, **values}, "scores": scores})
        if not math.isfinite(score):
            return Outcome(None, "it diverged")
        look(1, score)
        return Outcome(score)

    @abstractmethod
    def ready(self) -> None:
        """Complain about options by which it cannot work."""

    @abstractmethod
    def usual(self) -> dict[str, Any]:
        """Every setting, as it is by itself."""

    @abstractmethod
    def ranges(self) -> dict[str, Range]:
        """Between which bounds settings are tried."""

    @abstractmethod
    def scores(self, folder: Path, settings: Mapping[str, Any]) -> list[float]:
        """What is reached with these settings, run by run."""


class Bandits(Experiment):
    """Policies of one method in noisy worlds of `adpo reproduce bandits --tune`, which are not reported ones."""

    name = "bandits"
    measure = "WinMass of the sampled policy"
    options: ClassVar[dict[str, Any]] = {"method": "adpo-kde", "scenario": "all", "iterations": 200, "worlds": 4}
    bounds: ClassVar[dict[str, Range]] = {
        "beta": Range(0.1, 4.0),
        "tau": Range(0.5, 64.0),
        "tau_max": Range(0.5, 64.0),
        "scale": Range(0.1, 3.0),
        "decay": Range(0.9, 0.999, log=False),
        "clip": Range(0.05, 1.0),
        "penalty": Range(0.003, 0.5),
        "max_kl": Range(0.001, 0.1),
        "learning_rate": Range(1e-4, 5e-3),
    }

    def usual(self) -> dict[str, Any]:
        from adpo.experiments.bandits.jobs import tuned
        from adpo.experiments.bandits.methods import make
        from adpo.experiments.bandits.protocol import Protocol

        known = tuned()
        settings = known[self.one_of("method", list(known))]
        by_gradient = make(str(self.given["method"]), settings).region is None
        return {**settings, **({"learning_rate": Protocol().learning_rate} if by_gradient else {})}

    def ranges(self) -> dict[str, Range]:
        return {name: self.bounds[name] for name in self.usual() if name in self.bounds}

    def ready(self) -> None:
        self._scenarios()

    def _scenarios(self) -> Sequence[Any]:
        from adpo.experiments.bandits.jobs import TUNING_SCENARIOS

        known = {scenario.name: (scenario,) for scenario in TUNING_SCENARIOS} | {"all": TUNING_SCENARIOS}
        return known[self.one_of("scenario", list(known))]

    def scores(self, _: Path, settings: Mapping[str, Any]) -> list[float]:
        from adpo.experiments.bandits.jobs import TUNING_SEEDS, runs
        from adpo.experiments.bandits.protocol import Protocol

        protocol = replace(Protocol(), iterations=self.given["iterations"])
        rest = dict(settings)
        protocol = replace(protocol, learning_rate=rest.pop("learning_rate", protocol.learning_rate))
        first, count = TUNING_SEEDS[0] + self.seed * self.given["worlds"], self.given["worlds"]
        spec = (str(self.given["method"]), rest)
        found = runs(protocol, self._scenarios(), [spec], range(first, first + count))
        return [float(run["curve"][-1]["sampled"]) for run in found if run["method"] != "reference"]


class Distill(Experiment):
    """Students of a MuJoCo policy: what they earn without their noise, in episodes that are not reported ones."""

    name = "distill"
    measure = "share of the teacher's return"
    options: ClassVar[dict[str, Any]] = {
        "method": "ADPO anchored target",
        "env": "Hopper-v5",
        "states": 20_000,
        "steps": 3000,
        "students": 4,
        "episodes": 5,
    }
    first_student, first_episode = 10_000, 7 * 10**6

    def usual(self) -> dict[str, Any]:
        from adpo.experiments.distill.learning import Course
        from adpo.experiments.distill.methods import methods

        made = methods()
        chosen = made[self.one_of("method", list(made))]
        with_tau = {"tau": 1.0} if chosen.compares and chosen.guarded is None else {}
        with_decay = {"decay": chosen.decay} if chosen.anchor == "ema" else {}
        return {**with_tau, **with_decay, "learning_rate": Course().learning_rate}

    def ranges(self) -> dict[str, Range]:
        known = {
            "tau": Range(0.1, 10.0),
            "decay": Range(0.9, 0.999, log=False),
            "learning_rate": Range(5e-4, 2e-2),
        }
        return {name: known[name] for name in self.usual()}

    def ready(self) -> None:
        self._teacher()

    def _teacher(self) -> Any:
        from adpo.experiments.distill import teachers

        return teachers.load_teacher(str(self.given["env"]), teachers.SHIPPED)[0]

    def scores(self, folder: Path, settings: Mapping[str, Any]) -> list[float]:
        from adpo.experiments.distill import measures
        from adpo.experiments.distill.learning import Course, taught
        from adpo.experiments.distill.lessons import Lessons, record
        from adpo.experiments.distill.methods import methods

        world, episodes, count = str(self.given["env"]), self.given["episodes"], self.given["students"]
        teacher = self._teacher()
        shown = folder.parent / f"lessons-{world}.safetensors"
        if not shown.exists():
            record(teacher, world, self.given["states"], self.first_student).save(shown)
        made = {name: value for name, value in settings.items() if name != "learning_rate"}
        course = Course(steps=self.given["steps"], learning_rate=settings["learning_rate"])
        first = self.first_student + self.seed * count
        weights = taught(
            methods(**made)[str(self.given["method"])], course, Lessons.load(shown), range(first, first + count)
        )
        seed = self.first_episode + self.seed * episodes
        own = measures.earned_by(world, lambda seen: teacher(seen), 1, episodes, seed, noise=False).mean()
        return [float(each) for each in measures.earned(world, weights, episodes, seed, noise=False).mean(1) / own]


class Reasoning(Experiment):
    """Short runs of `adpo reproduce reasoning`: accuracy on watched problems at the end."""

    name = "reasoning"
    measure = "accuracy on watched problems"
    options: ClassVar[dict[str, Any]] = {
        "method": "adpo",
        "preset": "embedded",
        "rollouts": 0,  # as in the preset's search for a learning rate
        "model": "",
        "adapter": "",
        "data": "",
    }

    def usual(self) -> dict[str, Any]:
        from adpo.experiments.reasoning.methods import METHODS, SHORT
        from adpo.experiments.reasoning.protocol import PRESETS

        method = METHODS[SHORT[self.one_of("method", list(SHORT))]]
        preset = PRESETS[self.one_of("preset", list(PRESETS))]
        return {"learning_rate": preset.rates[0], **dict(method.settings[0])}

    def ranges(self) -> dict[str, Range]:
        from adpo.experiments.reasoning.protocol import PRESETS

        rates = PRESETS[str(self.given["preset"])].rates
        clip = CLIPS.get(str(self.given["method"]), RATES["train"])
        known = {
            "tau": TAU,
            "epsilon": clip,
            "epsilon_high": clip,
            "learning_rate": Range(min(rates) / 2, max(rates) * 2),
        }
        return {name: known[name] for name in self.usual()}

    def ready(self) -> None:
        self._place()

    def _place(self) -> Any:
        from adpo.experiments.reasoning import run
        from adpo.experiments.reasoning.protocol import PRESETS

        model, adapter, data = (str(self.given[name]) or None for name in ("model", "adapter", "data"))
        order = run.Order(Path(), model=model, adapter=adapter, data=None if data is None else Path(data))
        return run.placed(PRESETS[str(self.given["preset"])], order)

    def scores(self, _: Path, settings: Mapping[str, Any]) -> list[float]:
        from adpo.experiments.reasoning.methods import SHORT
        from adpo.experiments.reasoning.protocol import Trial
        from adpo.experiments.reasoning.trial import carried_out

        place = self._place()
        preset = place.preset
        more = tuple((name, value) for name, value in settings.items() if name != "learning_rate")
        rollouts = self.given["rollouts"] or preset.short
        method = SHORT[str(self.given["method"])]
        trial = Trial("rates", method, settings["learning_rate"], self.seed, rollouts, preset.inner, more=more)
        watched = carried_out(trial, preset, place.start, place.sets, lambda _: None)["watched"]
        return [watched.count("1") / len(watched)]


EXPERIMENTS: dict[str, type[Experiment]] = {kind.name: kind for kind in (Bandits, Distill, Reasoning)}


def _like(usual: Any, value: Any, name: str) -> Any:
    """As what it is by itself: a number where it is one."""
    if isinstance(usual, bool) or not isinstance(usual, int | float):
        return value
    try:
        return type(usual)(value)
    except (TypeError, ValueError):
        expected = "a number" if isinstance(usual, float) else "a whole number"
        raise ValueError(f"--{name} {value}: expected {expected}") from None
