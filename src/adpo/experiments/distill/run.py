"""The experiment as a job: recordings, teachers' own exams, and one cell for each method in each study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adpo.experiments.cells import Cell, Job, seeds_from
from adpo.experiments.distill import figures, film, outcomes, students, teachers, worlds
from adpo.experiments.distill.actor import Actor
from adpo.experiments.distill.lessons import Lessons
from adpo.experiments.distill.protocol import PRESETS, Lesson, Protocol
from adpo.experiments.distill.summary import against_kd, claims, outcome_name, summarised
from adpo.experiments.distill.tables import shown, tables
from adpo.experiments.tables import markdown, terminal
from adpo.system.files import write_json
from adpo.system.provenance import provenance

FILMED = "ADPO anchored target"


@dataclass(frozen=True)
class Order:
    """Where results go, and how the work is done."""

    out: Path
    resume: bool = False
    workers: int = 1
    on_progress: Callable[[float], None] = lambda _: None
    teachers: Path = teachers.SHIPPED


def reproduce(
    preset: str,
    environments: tuple[str, ...] | None,
    seeds: int | None,
    order: Order,
    dagger: int = 0,
    first_seed: int | None = None,
) -> dict[str, Any]:
    """Run what is missing, and write ``results.json``, ``tables.md`` and the figures."""
    protocol = PRESETS[preset]
    protocol = protocol if environments is None else replace(protocol, environments=environments)
    protocol = protocol if seeds is None else replace(protocol, seeds=seeds)
    protocol = protocol if first_seed is None else replace(protocol, first_seed=first_seed)
    protocol = replace(protocol, dagger=dagger)
    used = list(seeds_from(protocol.first_seed, protocol.seeds))
    for name in protocol.environments:
        worlds.known(name)
    cards = {name: teachers.load_teacher(name, order.teachers)[1] for name in protocol.environments}
    description = {"experiment": "distill", "preset": preset, **protocol.described(), "teachers": cards}
    job = Job(order.out, description, order.resume, provenance())
    recordings, cells = cells_of(protocol, order)
    cells = [*recordings, *cells]
    total, done = sum(cell.weight for cell in cells), dict.fromkeys((cell.name for cell in cells), 0.0)

    def progress(cell: Cell, share: float) -> None:
        done[cell.name] = share * cell.weight
        order.on_progress(sum(done.values()) / total)

    prepare = partial(torch.set_num_threads, 1)
    job.run(recordings, progress, order.workers, prepare)
    found = job.run(cells, progress, order.workers, prepare)
    results = {
        "preset": preset,
        "seeds": used,
        "provenance": job.provenances(cells),
        "recorded": {name: found[f"lessons-{name}"] for name in protocol.environments},
        "teachers": cards,
        "own": {name: found[own_name(name)] for name in protocol.environments},
        "outcomes": {cell: value for cell, value in found.items() if cell.startswith("outcome-")},
    }
    results["summary"] = summarised(results, protocol)
    results["claims"] = claims(results, protocol) if preset == "paper" else []  # no verdicts on small trials
    results["against_kd"] = against_kd(results, protocol)
    write_json(order.out / "results.json", results)
    (order.out / "tables.md").write_text(markdown(tables(results)))
    figures.draw(results, order.out)
    results["not_filmed"] = {name: _filmed(name, order) for name in protocol.environments}
    return results


def _filmed(name: str, order: Order) -> str | None:
    """A student of the main study beside its teacher: a strip of pictures, or what kept it from being drawn."""
    kept = student_at(order.out, name)
    if not kept.exists():  # results of a copy without it
        return f"there is no {kept.name}"
    teacher = teachers.load_teacher(name, order.teachers)[0]
    return film.strip(name, teacher, students.load(kept), order.out / f"film-{name}.png", outcomes.EPISODE_SEED)


def show(results: dict[str, Any], console: Console) -> None:
    """The main tables, on the terminal."""
    for table in terminal(shown(results)):
        console.print(table)
    for name, reason in results["not_filmed"].items():
        if reason is not None:
            console.print(f"no pictures of {name}: {reason}", markup=False)


def cells_of(protocol: Protocol, order: Order) -> tuple[list[Cell], list[Cell]]:
    """What is recorded first, and all that needs it."""
    places = {
        name: Place(name, protocol, order.teachers, lessons_at(order.out, name), student_at(order.out, name))
        for name in protocol.environments
    }
    recordings = [Cell(f"lessons-{name}", partial(_record, place), 0.5) for name, place in places.items()]
    cells = [Cell(own_name(name), partial(_own, place), 0.5) for name, place in places.items()]
    for name, place in places.items():
        for lesson in protocol.lessons():
            weight = 2.0 + lesson.course.steps / 1000 + (10.0 if lesson == protocol.main else 0.0)
            cells += [
                Cell(outcome_name(name, lesson, method), partial(_outcome, place, lesson, method), weight)
                for method in protocol.methods(lesson)
            ]
    return recordings, cells


def own_name(name: str) -> str:
    return f"own-{name}"


def lessons_at(out: Path, name: str) -> Path:
    return out / f"lessons-{name}.safetensors"


def student_at(out: Path, name: str) -> Path:
    return out / f"student-{name}.safetensors"


@dataclass(frozen=True)
class Place:
    """Where a cell finds its teacher and what it showed, and where the student to be filmed goes."""

    name: str
    protocol: Protocol
    teachers: Path
    lessons: Path
    student: Path

    @property
    def teacher(self) -> Actor:
        return teachers.load_teacher(self.name, self.teachers)[0]


def _record(place: Place, _: Any) -> Any:
    found = outcomes.recorded(place.teacher, place.name, place.protocol)
    found.save(place.lessons)
    return {"states": len(found.states), "episodes": int(found.episode.max()) + 1}


def _own(place: Place, _: Any) -> Any:
    return outcomes.teachers_own(place.name, place.teacher, place.protocol)


def _outcome(place: Place, lesson: Lesson, method: str, _: Any) -> Any:
    practice, held_out = _recorded(place.lessons, place.protocol.held_out)
    keep = place.student if lesson == place.protocol.main and method == FILMED else None
    return outcomes.outcome(place.name, method, lesson, place.protocol, place.teacher, practice, held_out, keep)


@lru_cache(maxsize=2)
def _recorded(path: Path, held_out: int) -> tuple[Lessons, Lessons]:
    """Practice, and whole episodes held out: read once in a process."""
    return Lessons.load(path).split(held_out)
