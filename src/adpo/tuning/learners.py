"""A learner of an experiment as a job: its options, its settings, and a trial of it in this process."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from adpo.runs.settings.keys import parse_pairs
from adpo.system.files import write_json
from adpo.tuning.spaces import Range
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
        found = {name: _like(usual, typed.get(name, usual), name) for name, usual in self.options.items()}
        for name, value in found.items():
            if isinstance(value, int) and value < min(1, self.options[name]):
                raise ValueError(f"--{name} {value}: expected at least 1")
        return found

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
        for name in values:
            if not is_number(known[name]):
                raise ValueError(f"--range {name}: it is not a number, but {known[name]}")
        self.built(self.settings(values))

    def settings(self, values: Mapping[str, float]) -> dict[str, Any]:
        """Every setting: tried, chosen, or as it is."""
        found = {}
        for name, usual in self.usual().items():
            if name in values:
                found[name] = round(values[name]) if isinstance(usual, int) else values[name]
            else:
                found[name] = _like(usual, self.chosen.get(name, usual), name)
        return found

    def carried_out(self, folder: Path, values: Mapping[str, float], look: Look) -> Outcome:
        settings = self.settings(values)
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)  # small matrices gain nothing from more
        try:
            scores = self.scores(folder, settings)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            return Outcome(None, f"it failed: {error}")
        score = sum(scores) / len(scores)
        if not math.isfinite(score):
            return Outcome(None, "it diverged")
        write_json(folder / SCORE, {"settings": settings, "scores": scores})
        look(1, score)
        return Outcome(score)

    @abstractmethod
    def ready(self) -> None:
        """Complain about options by which it cannot work."""

    @abstractmethod
    def built(self, settings: Mapping[str, Any]) -> Any:
        """The method with these settings; complains about those that make none."""

    @abstractmethod
    def usual(self) -> dict[str, Any]:
        """Every setting, as it is by itself."""

    @abstractmethod
    def ranges(self) -> dict[str, Range]:
        """Between which bounds settings are tried."""

    @abstractmethod
    def scores(self, folder: Path, settings: Mapping[str, Any]) -> list[float]:
        """What is reached with these settings, run by run."""


def positive(settings: Mapping[str, Any]) -> None:
    """Complain about a number that is not."""
    for name, value in settings.items():
        if is_number(value) and not value > 0:
            raise ValueError(f"{name} {value:g}: expected more than 0")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _like(usual: Any, value: Any, name: str) -> Any:
    """As what it is by itself: a number where it is one."""
    if not is_number(usual):
        return value
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    whole = isinstance(usual, int)
    if isinstance(value, bool) or not math.isfinite(found) or (whole and not found.is_integer()):
        raise ValueError(f"--{name} {value}: expected {'a whole number' if whole else 'a number'}")
    return int(found) if whole else found
