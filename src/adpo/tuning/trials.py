"""One trial of a command: the job as a user would type it, in a process of its own, followed by what it logs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from adpo.system.files import read_lines

LOOKS = ("validation/accuracy", "validation/reward")
"""What a job logs of its validation set: one of them."""
METRICS, SETTINGS, NOTE, LOG = "metrics.jsonl", "settings.json", "best/validation.json", "log.txt"
PATIENCE = 20.0
"""Seconds for a job to end after it has been asked to."""


Look = Callable[[int, float], bool]
"""Is told a step and what was reached there; whether to give up."""


@dataclass(frozen=True)
class Outcome:
    """What a trial reached, a share of what can be reached; where it has none, why."""

    score: float | None
    why: str = ""
    behind: bool = False  # given up because the others are better; else it failed
    measure: str = ""

    def __str__(self) -> str:
        return self.why if self.score is None else shown(self.score, self.measure)


ACCURACY, PAIRS, REWARD = (
    f"{what} on the validation set" for what in ("accuracy", "share of pairs in order", "mean reward")
)
"""What the scores of a command are. All but a reward are shares."""


def unit(measure: str) -> tuple[float, str]:
    """What a score is multiplied with to be shown, and the unit it then has."""
    return (1.0, "") if measure == REWARD else (100.0, "%")


def shown(score: float, measure: str) -> str:
    """A share as a percentage, a reward in its own unit."""
    return f"{score:.4g}" if measure == REWARD else f"{score:.1%}"


def with_unit(measure: str) -> str:
    """The head of a column."""
    return ", ".join(part for part in (measure, unit(measure)[1]) if part)


class Tried(Protocol):
    """A job whose settings can be tried out."""

    @property
    def name(self) -> str: ...

    @property
    def words(self) -> tuple[str, ...]: ...

    @property
    def seed(self) -> int: ...

    @property
    def measure(self) -> str:
        """What its scores are."""

    def with_seed(self, seed: int) -> Tried:
        """The same job."""

    def checked(self, folder: Path, values: Mapping[str, float], /) -> None:
        """Complain about a mistake in the settings, before the first trial."""

    def carried_out(self, folder: Path, values: Mapping[str, float], look: Look, /) -> Outcome:
        """With these settings; settings that are not among them are as they are."""


@dataclass(frozen=True)
class Job:
    """A command, as it is typed."""

    name: str  # train or prefer
    words: tuple[str, ...]
    seed: int
    measure: str = ACCURACY

    def with_seed(self, seed: int) -> Job:
        return replace(self, seed=seed)

    def command(self, folder: Path, values: Mapping[str, float], more: Sequence[str] = ()) -> list[str]:
        chosen = [part for name, value in values.items() for part in (f"--{name}", f"{value:g}")]
        where = ["--out", str(folder), "--seed", str(self.seed)]
        return [sys.executable, "-m", "adpo", self.name, *self.words, *chosen, *where, *more]

    def checked(self, folder: Path, values: Mapping[str, float]) -> None:
        """A mistake in the settings is told before the first trial, as the job tells it."""
        done = subprocess.run(
            self.command(folder, values, ["--dry-run"]), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(_last_line(done.stderr).removeprefix("adpo: "))

    def carried_out(self, folder: Path, values: Mapping[str, float], look: Look, every: float = 0.5) -> Outcome:
        """What the model that the run keeps reached; ``look`` gets every evaluation, and may end the run."""
        resume = ["--resume"] if (folder / SETTINGS).exists() else []
        folder.mkdir(parents=True, exist_ok=True)
        seen = 0
        with (folder.parent / f"{folder.name}.{LOG}").open("a") as log:
            process = subprocess.Popen(self.command(folder, values, resume), stdout=log, stderr=log)
            try:
                while process.poll() is None:
                    time.sleep(every)
                    looks = accuracies(folder)
                    for step, accuracy in looks[seen:]:
                        if look(step, accuracy):
                            return Outcome(None, "behind the others", behind=True)
                    seen = max(seen, len(looks))
            finally:
                _ended(process)
        for step, accuracy in accuracies(folder)[seen:]:
            look(step, accuracy)
        if process.returncode == 0 and (folder / NOTE).exists():
            return Outcome(float(json.loads((folder / NOTE).read_text())["value"]), measure=self.measure)
        said = _last_line((folder.parent / f"{folder.name}.{LOG}").read_text(errors="replace"))
        return Outcome(None, f"exit code {process.returncode}: {said}")


def accuracies(folder: Path) -> list[tuple[int, float]]:
    """Evaluations so far: step and score."""
    rows = read_lines(folder / METRICS)
    return [(int(row["step"]), float(row[name])) for row in rows for name in LOOKS if name in row]


def tidied(folder: Path, kept: bool) -> None:
    """Without its checkpoints; the model stays where the trial is the best so far."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    if not kept:
        for model in (*folder.glob("best/*.safetensors"), *folder.glob("model/*.safetensors")):
            model.unlink(missing_ok=True)


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Asked, then made to."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
