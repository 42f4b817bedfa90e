"""The experiment as a job: recordings, teachers' own exams, and one cell for each method in each study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from adpo.experiments.cells import Cell, Job
from adpo.experiments.distill import outcomes, teachers
from adpo.experiments.distill.lessons import Lessons
from adpo.experiments.distill.methods import methods
from adpo.experiments.distill.protocol import PRESETS, Lesson, Protocol
from adpo.experiments.distill.summary import summarised
from adpo.files import write_json
from adpo.provenance import provenance


@dataclass(frozen=True)
class Order:
    """Where results go, and how the work is done."""

    out: Path
    resume: bool = False
    workers: int = 1
    on_progress: Callable[[float], None] = lambda _: None
    teachers: Path = teachers.SHIPPED


def reproduce(
    preset: str, environments: tuple[str, ...] | None, seeds: int | None, order: Order
) -> dict[str, Any]:
    """Run what is missing, and write ``results.json``."""
    protocol = PRESETS[preset]
    protocol = protocol if environments is None else replace(protocol, environments=environments)
    protocol = protocol if seeds is None else replace(protocol, seeds=seeds)
    cards = {name: teachers.load_teacher(name, order.teachers)[1] for name in protocol.environments}
    description = {"experiment": "distill", "preset": preset, **protocol.described(), "teachers": cards}
    job = Job(order.out, description, order.resume, provenance())
    cells = cells_of(protocol, order.teachers)
    total, done = sum(cell.weight for cell in cells), dict.fromkeys((cell.name for cell in cells), 0.0)

    def progress(cell: Cell, share: float) -> None:
        done[cell.name] = share * cell.weight
        order.on_progress(sum(done.values()) / total)

    found = job.run(cells, progress, order.workers, partial(torch.set_num_threads, 1))
    results = {
        "preset": preset,
        "provenance": job.provenances(cells),
        "teachers": cards,
        "own": {name: found[own_name(name)] for name in protocol.environments},
        "outcomes": {cell: value for cell, value in found.items() if cell.startswith("outcome-")},
    }
    results["summary"] = summarised(results, protocol)
    write_json(order.out / "results.json", results)
    return results


def cells_of(protocol: Protocol, folder: Path) -> list[Cell]:
    cells = [Cell(own_name(name), partial(_own, name, protocol, folder), 0.5) for name in protocol.environments]
    for name in protocol.environments:
        for lesson in protocol.lessons():
            weight = 5.0 if lesson == protocol.base else 1.0
            cells += [
                Cell(
                    outcome_name(name, lesson, method),
                    partial(_outcome, name, lesson, method, protocol, folder),
                    weight,
                )
                for method in methods()
            ]
    return cells


def own_name(name: str) -> str:
    return f"own-{name}"


def outcome_name(name: str, lesson: Lesson, method: str) -> str:
    return f"outcome-{name}-{lesson.name}-{method}"


def _own(name: str, protocol: Protocol, folder: Path, _: Any) -> Any:
    return outcomes.teachers_own(name, teachers.load_teacher(name, folder)[0], protocol)


def _outcome(name: str, lesson: Lesson, method: str, protocol: Protocol, folder: Path, _: Any) -> Any:
    practice, held_out = _recorded(name, protocol, folder)
    return outcomes.outcome(name, method, lesson, protocol, practice, held_out)


@lru_cache(maxsize=2)
def _recorded(name: str, protocol: Protocol, folder: Path) -> tuple[Lessons, Lessons]:
    """Once in a process: the same in each, for it depends on the teacher and seeds alone."""
    return outcomes.recorded(teachers.load_teacher(name, folder)[0], name, protocol)
