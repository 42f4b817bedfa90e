"""The experiment as a job: recordings, teachers' own exams, and one cell for each method in each study."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from adpo.experiments.distill import figures, film, outcomes, students, teachers, worlds
from adpo.experiments.distill.actor import Actor
from adpo.experiments.distill.lessons import Lessons
from adpo.experiments.distill.protocol import PRESETS, Lesson, Protocol
from adpo.experiments.distill.summary import against_kd, claims, outcome_name, summarised
from adpo.experiments.distill.tables import shown, tables
from adpo.experiments.seeds import seeds_from
from adpo.experiments.session import Options, Session, one_thread
from adpo.experiments.tables import markdown, terminal
from adpo.experiments.workers import Cell
from adpo.system.files import write_json

FILMED = "ADPO anchored target"


@dataclass(frozen=True)
class Order(Options):
    """Where results go, and how the work is done."""

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
    places = [Place(name, protocol, order.teachers, order.out) for name in protocol.environments]
    recordings = [place.recording() for place in places]
    cells = [cell for place in places for cell in place.cells()]
    session = Session(order, description, weight=sum(cell.weight for cell in (*recordings, *cells)))
    found = session.run(recordings, one_thread) | session.run(cells, one_thread)
    results = {
        "preset": preset,
        "seeds": used,
        "provenance": session.provenances(),
        "recorded": {place.name: found[place.recording().name] for place in places},
        "teachers": cards,
        "own": {place.name: found[place.own().name] for place in places},
        "outcomes": {cell: value for cell, value in found.items() if cell.startswith("outcome-")},
    }
    results["summary"] = summarised(results, protocol)
    results["claims"] = claims(results, protocol) if preset == "paper" else []  # no verdicts on small trials
    results["against_kd"] = against_kd(results, protocol)
    write_json(order.out / "results.json", results)
    (order.out / "tables.md").write_text(markdown(tables(results)))
    figures.draw(results, order.out)
    results["not_filmed"] = {place.name: place.film() for place in places}
    return results


def show(results: dict[str, Any], console: Console) -> None:
    """The main tables, on the terminal."""
    for table in terminal(shown(results)):
        console.print(table)
    for name, reason in results["not_filmed"].items():
        if reason is not None:
            console.print(f"no pictures of {name}: {reason}", markup=False)


@dataclass(frozen=True)
class Place:
    """An environment, where its teacher comes from, and the folder of what is kept of both."""

    name: str
    protocol: Protocol
    teachers: Path
    out: Path

    @property
    def teacher(self) -> Actor:
        return teachers.load_teacher(self.name, self.teachers)[0]

    @property
    def lessons(self) -> Path:
        return self.out / f"lessons-{self.name}.safetensors"

    @property
    def student(self) -> Path:
        return self.out / f"student-{self.name}.safetensors"

    def recording(self) -> Cell:
        """What all others need."""
        return Cell(f"lessons-{self.name}", self._record, 0.5)

    def own(self) -> Cell:
        """What the teacher itself earns."""
        return Cell(f"own-{self.name}", self._own, 0.5)

    def cells(self) -> list[Cell]:
        cells = [self.own()]
        for lesson in self.protocol.lessons():
            weight = 2.0 + lesson.course.steps / 1000 + (10.0 if lesson == self.protocol.main else 0.0)
            cells += [
                Cell(outcome_name(self.name, lesson, method), partial(self._outcome, lesson, method), weight)
                for method in self.protocol.methods(lesson)
            ]
        return cells

    def film(self) -> str | None:
        """A student of the main study beside its teacher: pictures, or what kept them from being drawn."""
        if not self.student.exists():  # results of a copy without it
            return f"there is no {self.student.name}"
        path = self.out / f"film-{self.name}.png"
        return film.strip(self.name, self.teacher, students.load(self.student), path, outcomes.EPISODE_SEED)

    def _record(self, _: Any) -> Any:
        found = outcomes.recorded(self.teacher, self.name, self.protocol)
        found.save(self.lessons)
        return {"states": len(found.states), "episodes": int(found.episode.max()) + 1}

    def _own(self, _: Any) -> Any:
        return outcomes.teachers_own(self.name, self.teacher, self.protocol)

    def _outcome(self, lesson: Lesson, method: str, _: Any) -> Any:
        practice, held_out = _recorded(self.lessons, self.protocol.held_out)
        keep = self.student if lesson == self.protocol.main and method == FILMED else None
        return outcomes.outcome(self.name, method, lesson, self.protocol, self.teacher, practice, held_out, keep)


@lru_cache(maxsize=2)
def _recorded(path: Path, held_out: int) -> tuple[Lessons, Lessons]:
    """Practice, and whole episodes held out: read once in a process."""
    return Lessons.load(path).split(held_out)
