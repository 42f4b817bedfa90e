"""What is trained on, what is watched, and what is asked in the exam: no problem is in two of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adpo.experiments.reasoning.protocol import Files, Preset
from adpo.runs.settings.train_settings import RunSettings
from adpo.runs.splits import Row, named, row_of
from adpo.tasks.generated_tasks import Problem, alike, up_to
from adpo.tasks.problems import load, of_rows, without_likes_of

INSTRUCTION = RunSettings.instruction
"""That of `adpo train`."""


@dataclass(frozen=True)
class Sets:
    """Rows as TRL takes them: a prompt, and what rewards look at."""

    train: list[Row]
    watched: list[Row]  # of the learning curve: set aside from the training problems
    exams: dict[str, list[Row]]  # by name; the first is the one that is reported
    warm: list[Row] = field(default_factory=list)  # whose answers the start is taught


def generated(preset: Preset) -> Sets:
    """Arithmetic for the model of characters."""
    train = up_to(preset.task, 8000, level=preset.level, seed=0)
    test = up_to(preset.task, preset.examined, level=preset.level, seed=0, split="test")
    watched = train[: preset.watched]
    near = {alike(problem) for problem in watched}
    rest = [problem for problem in train[preset.watched :] if alike(problem) not in near]

    def rows(problems: list[Problem]) -> list[Row]:
        return [row_of(problem, None, None) for problem in problems]

    return Sets(rows(rest), rows(watched), {preset.exams[0]: rows(test)})


def held_out(data: Path | None, files: Files) -> dict[str, list[Problem]]:
    """All problems of the exams, asked or not."""
    return {name: _read(data, file, files) for name, file, _ in files.exams}


def _read(data: Path | None, file: str, files: Files) -> list[Problem]:
    """Of a folder; without one, of the data set by name, whose splits are called as the files are."""
    if data is not None:
        return load(data / file, files.levels)
    assert files.named is not None
    split = Path(file).stem
    return of_rows(named(files.named, None, split), f"{files.named}, {split}", files.levels)


def from_files(data: Path | None, preset: Preset, tokenizer: Any) -> Sets:
    """Problems in words; those that resemble one of an exam, numbers apart, are not trained on."""
    files = preset.files
    assert files is not None
    exams = held_out(data, files)
    once = {problem.question: problem for problem in _read(data, files.train, files)}  # some are there twice
    learnt = without_likes_of(list(once.values()), *exams.values())
    random.Random(0).shuffle(learnt)
    watched = learnt[: preset.watched]
    rest = without_likes_of(learnt[preset.watched :], watched)
    shuffled = {name: random.Random(0).sample(problems, len(problems)) for name, problems in exams.items()}
    if len(rest) < 2 * preset.groups:
        source = files.named if data is None else data / files.train
        raise ValueError(
            f"{source} has {len(rest)} problems unlike those of the exams; {2 * preset.groups} are needed"
        )

    taught = int(preset.warmed * len(rest))

    def rows(problems: list[Problem]) -> list[Row]:
        return [row_of(problem, tokenizer, INSTRUCTION) for problem in problems]

    return Sets(
        rows(rest[taught:]),
        rows(watched),
        {name: rows(shuffled[name][: min(most, preset.examined)]) for name, _, most in files.exams},
        rows(rest[:taught]),
    )
