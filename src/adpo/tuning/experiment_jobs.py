"""Jobs that are no commands of their own: learners of the experiments.

They learn and are examined where the reported runs are not: in other worlds, other episodes, on watched problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from adpo.tuning.learners import Experiment, positive
from adpo.tuning.spaces import CLIPS, TAU, Range


class Bandits(Experiment):
    """Policies of one method in noisy worlds of `adpo reproduce bandits --tune`, which are not reported ones."""

    name = "bandits"
    measure = "WinMass of the sampled policy"
    options: ClassVar[dict[str, Any]] = {"method": "adpo-kde", "scenario": "all", "iterations": 200, "worlds": 4}
    of_pairs = Range(0.01, 2.0)
    """DPO's beta, which is no temperature of rewards."""
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
        found = {name: self.bounds[name] for name in self.usual() if name in self.bounds}
        return {**found, "beta": self.of_pairs} if str(self.given["method"]).startswith("dpo-") else found

    def ready(self) -> None:
        self._scenarios()

    def built(self, settings: Mapping[str, Any]) -> Any:
        from adpo.experiments.bandits.methods import GRID, make

        name = str(self.given["method"])
        for setting, known in GRID[name].items():
            words = [value for value in known if isinstance(value, str)]
            if words and settings[setting] not in words:
                raise ValueError(f"--{setting} {settings[setting]}: expected one of {', '.join(words)}")
        positive(settings)
        return make(name, {setting: value for setting, value in settings.items() if setting != "learning_rate"})

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

    def built(self, settings: Mapping[str, Any]) -> Any:
        from adpo.experiments.distill.methods import methods

        positive(settings)
        made = {name: value for name, value in settings.items() if name != "learning_rate"}
        return methods(**made)[str(self.given["method"])]

    def _teacher(self) -> Any:
        from adpo.experiments.distill import teachers

        return teachers.load_teacher(str(self.given["env"]), teachers.SHIPPED)[0]

    def scores(self, folder: Path, settings: Mapping[str, Any]) -> list[float]:
        from adpo.experiments.distill import measures
        from adpo.experiments.distill.learning import Course, taught
        from adpo.experiments.distill.lessons import Lessons, record

        world, episodes, count = str(self.given["env"]), self.given["episodes"], self.given["students"]
        teacher = self._teacher()
        shown = folder.parent / f"lessons-{world}.safetensors"
        if not shown.exists():
            record(teacher, world, self.given["states"], self.first_student).save(shown)
        course = Course(steps=self.given["steps"], learning_rate=settings["learning_rate"])
        first = self.first_student + self.seed * count
        weights = taught(self.built(settings), course, Lessons.load(shown), range(first, first + count))
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
        from adpo.experiments.reasoning.presets import PRESETS

        method = METHODS[SHORT[self.one_of("method", list(SHORT))]]
        preset = PRESETS[self.one_of("preset", list(PRESETS))]
        return {"learning_rate": preset.rates[0], **dict(method.settings[0])}

    def ranges(self) -> dict[str, Range]:
        from adpo.experiments.reasoning.presets import PRESETS

        rates = PRESETS[str(self.given["preset"])].rates
        known = {"tau": TAU, "learning_rate": Range(min(rates) / 2, max(rates) * 2)}
        if clip := CLIPS.get(str(self.given["method"])):
            known |= {"epsilon": clip, "epsilon_high": clip}
        return {name: known[name] for name in self.usual()}

    def ready(self) -> None:
        self._place()  # complains about what it cannot read

    def built(self, settings: Mapping[str, Any]) -> Any:
        positive(settings)

    def _place(self) -> Any:
        from adpo.experiments.reasoning import run
        from adpo.experiments.reasoning.presets import PRESETS

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
        found = carried_out(trial, preset, place.start, place.sets, lambda _: None)
        right = found["watched"]
        return [math.nan if found["stopped"] or not right else right.count("1") / len(right)]


EXPERIMENTS: dict[str, type[Experiment]] = {kind.name: kind for kind in (Bandits, Distill, Reasoning)}
