"""The experiment as a job: the start's own exam, then trials, each a cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from adpo.experiments.cells import check_folder, fingerprint
from adpo.experiments.reasoning import comparisons, known, parts, problems, summary, trial, warmup
from adpo.experiments.reasoning.answers import WATCHED
from adpo.experiments.reasoning.figures import draw
from adpo.experiments.reasoning.known import Known
from adpo.experiments.reasoning.methods import SHORT
from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.problems import Sets
from adpo.experiments.reasoning.protocol import Preset, Trial
from adpo.experiments.reasoning.starts import Start, embedded_start
from adpo.experiments.reasoning.tables import tables
from adpo.experiments.seeds import seeds_from
from adpo.experiments.session import Options, Session, in_minutes, one_thread
from adpo.experiments.tables import markdown, terminal
from adpo.experiments.workers import Cell, Report
from adpo.runs.by_name import quiet
from adpo.system.files import digest, write_json


@dataclass(frozen=True)
class Order(Options):
    """Where results go, how the work is done, and with which models and problems."""

    minutes: float | None = None  # begin no trial after so many
    model: str | None = None  # in place of the preset's
    adapter: str | None = None
    data: Path | None = None  # folder with the problems
    known: Path | None = None  # runs of an earlier job
    studies: tuple[str, ...] | None = None  # some of them, beside the choice of rates and settings


@dataclass(frozen=True)
class Place:
    """What a trial needs to know, in whichever process it is carried out."""

    preset: Preset
    start: Start
    data: Path | None

    @property
    def sets(self) -> Sets:
        return _sets(self)


@lru_cache(maxsize=1)
def _sets(place: Place) -> Sets:
    if place.preset.start == "embedded":
        return problems.generated(place.preset)
    return problems.from_files(place.data, place.preset, place.start.tokenizer())


def reproduce(
    name: str, methods: Sequence[str] | None, seeds: int | None, order: Order, first_seed: int | None = None
) -> dict[str, Any]:
    """Run what is missing; write results, all and as a line for each run, tables and figures."""
    quiet()
    preset = _chosen(name, methods, seeds, first_seed)
    if order.studies is not None:
        _each_once("studies", order.studies, preset.studies())
    listed = [] if order.known is None else known.read(order.known)
    check_folder(order.out, order.resume)  # the start may take a minute to make
    place = placed(preset, order)
    weights = place.start.digest()
    description = {"experiment": "reasoning", "preset": name, "weights": weights, **preset.described()}
    description["data"] = _digests(preset, order)
    same = fingerprint(description)
    earlier = Known() if order.known is None else known.taken(listed, order.known, name, weights, same)
    apart = parts.of(place.sets)  # what cannot be read is complained about before anything is written
    work = _Work(Session(order, description, end=in_minutes(order.minutes)), place, order, earlier)
    start, runs = work.begun(Cell("start", partial(_examined, place), preset.rollouts), preset.choosing())
    if not work.left:  # else a rate may be missing that is better
        runs += work.trials(preset.further(summary.chosen(runs), summary.tried(runs)))
    if not work.left:
        runs += work.trials(preset.settings(summary.chosen(runs)))
    best = summary.chosen(runs)
    if not work.left:
        runs += work.trials([*preset.reported(best), *preset.beside(best)])
    parts.add(runs, start, apart)
    asked = (*preset.exams, *(part for part in apart if parts.kept(runs, part)), WATCHED)
    said = earlier.against
    results = {
        "preset": name,
        "seeds": list(seeds_from(preset.first_seed, preset.seeds)),
        "provenance": work.provenances(),
        "start_digest": weights,
        "job": same,
        "start": start,
        "best": {method: {"rate": rate, **dict(more)} for method, (rate, more) in best.items()},
        "runs": runs,
        "exams": preset.exams,
        "parts": tuple(apart),
        "rows": summary.rows_of(summary.lines_of(runs, start, preset.exams[0]), (*preset.exams, *apart)),
        "against": [
            *(line for exam in asked for line in comparisons.against(runs, exam, said)),
            *comparisons.against_beside(runs, preset.exams[0], said),
        ],
        "not_yet": work.left,
        "known_elsewhere": [line for line in earlier.lines if line not in work.wanted],
    }
    write_json(order.out / "results.json", results)
    write_json(order.out / "runs.json", summary.listed(results))
    (order.out / "tables.md").write_text(markdown(tables(results)))
    draw(results, order.out)
    return results


def placed(preset: Preset, order: Order) -> Place:
    """The start of a preset, or the one that is asked for, ready to be trained."""
    return Place(preset, _start(preset, order).unpacked(), order.data)


def warm_up(name: str, order: Order, epochs: int) -> str:
    """Make the start of a preset, an adapter in ``--out``; what it is like, as a line."""
    quiet()
    preset = PRESETS[name]
    if preset.start == "embedded":
        raise ValueError("--warm-up is for models that are given: the embedded one is warmed up by itself")
    if not preset.warmed:
        raise ValueError(f"--warm-up: all problems of the {name} preset are for rewards, its start is the model")
    if order.adapter is not None:
        raise ValueError("--warm-up makes an adapter: leave --adapter out")
    place = Place(preset, _start(preset, order), order.data)
    assert order.data is not None
    if not (order.data / warmup.SOLUTIONS).is_file():
        raise ValueError(f"--data {order.data}: there is no {warmup.SOLUTIONS} in it, which --warm-up teaches")
    recipe = warmup.Recipe(epochs)
    card = warmup.warmed_up(place.start, order.data, preset, place.sets, order.out, recipe, order.on_progress)
    return warmup.told(card)


def _chosen(name: str, methods: Sequence[str] | None, seeds: int | None, first_seed: int | None = None) -> Preset:
    preset = PRESETS[name]
    if methods is not None:
        _each_once("methods", methods, tuple(SHORT))
        preset = replace(preset, methods=tuple(SHORT[each] for each in methods))
    preset = preset if seeds is None else replace(preset, seeds=seeds)
    preset = preset if first_seed is None else replace(preset, first_seed=first_seed)
    seeds_from(preset.first_seed, max(preset.seeds, preset.variant_seeds, preset.repeats))
    return preset


def _each_once(option: str, given: Sequence[str], expected: Sequence[str]) -> None:
    unknown = [each for each in given if each not in expected]
    if unknown:
        raise ValueError(f"--{option} {unknown[0]!r}: expected some of {', '.join(expected)}")
    if len(set(given)) < len(given):
        raise ValueError(f"--{option} {','.join(given)}: expected each once")


def _start(preset: Preset, order: Order) -> Start:
    if preset.start == "embedded":
        for option, given in (("model", order.model), ("adapter", order.adapter), ("data", order.data)):
            if given is not None:
                raise ValueError(f"--{option} is for --preset gpu and paper; got {given} for the embedded model")
        return embedded_start(preset.task, preset.level)
    assert preset.files is not None
    if order.data is not None:
        missing = [file for file in preset.files.all if not (order.data / file).is_file()]
        if missing:
            raise ValueError(f"--data {order.data}: there is no {missing[0]} in it")
    elif preset.files.named is None:
        raise ValueError(f"this preset needs --data, a folder with {', '.join(preset.files.all)}")
    if preset.start == "smollm2" and order.model is None:
        raise ValueError("this preset needs --model, a .gguf file or a folder of SmolLM2-135M-Instruct")
    return Start(order.model or preset.start, order.adapter)


def _digests(preset: Preset, order: Order) -> dict[str, str]:
    """Results from other problems are never merged."""
    if preset.files is None:
        return {}
    if order.data is None:
        return {"named": str(preset.files.named)}
    return {file: digest(order.data / file)[:16] for file in preset.files.all}


class _Work:
    """Trials of an earlier job, and of this one as long as there is time."""

    def __init__(self, session: Session, place: Place, order: Order, earlier: Known) -> None:
        self.session, self.place, self.order, self.earlier = session, place, order, earlier
        self.job = session.job
        self.wanted: set[str] = set()
        self.taken = False  # something from what is known

    @property
    def left(self) -> list[str]:
        """Names of the cells that there was no time for."""
        return self.session.pending

    def begun(self, start: Cell, wanted: Iterable[Trial]) -> tuple[Any, list[dict[str, Any]]]:
        """What the rest is compared with, whatever the time, and the first trials beside it."""
        runs = self.trials(wanted, (start,))
        return self.session.finish(start), runs

    def trials(self, wanted: Iterable[Trial], before: Sequence[Cell] = ()) -> list[dict[str, Any]]:
        """Those that are there, those that are known, and those that are asked for and that there is time for."""
        cells = {
            each: Cell(name, partial(_carried_out, self.place, each, self.job.unfinished(name)), each.rollouts)
            for each, name in ((each, f"trial-{each.name}") for each in wanted)
        }
        self.wanted |= {each.name for each in cells}
        known = {
            each: self.earlier.run(each)
            for each, cell in cells.items()
            if each.name in self.earlier.lines and not self.job.has(cell)  # which knows more
        }
        self.taken = self.taken or bool(known)
        mine = {each: cell for each, cell in cells.items() if each not in known}
        prepare = one_thread if self.order.workers > 1 else None
        self.session.run([*before, *self._in_order(mine)], prepare)
        found = known | {each: self.job.result(cell) for each, cell in mine.items() if self.job.has(cell)}
        return [found[each] for each in cells if each in found]

    def _in_order(self, cells: dict[Trial, Cell]) -> list[Cell]:
        """Those that are there or asked for, by what was asked for first."""
        if self.order.studies is None:
            return list(cells.values())
        places = {study: place for place, study in enumerate(("rates", *self.order.studies))}
        mine = [each for each, cell in cells.items() if each.study in places or self.job.has(cell)]
        return [cells[each] for each in sorted(mine, key=lambda each: places.get(each.study, len(places)))]

    def provenances(self) -> list[dict[str, str]]:
        """Of what is known, then of what was carried out here."""
        both = [*(self.earlier.provenance if self.taken else ()), *self.session.provenances()]
        return [each for number, each in enumerate(both) if each not in both[:number]]


def _examined(place: Place, report: Report) -> Any:
    return trial.examined(place.start, place.preset, place.sets, report)


def _carried_out(place: Place, wanted: Trial, unfinished: Path, report: Report) -> Any:
    quiet()
    return trial.carried_out(wanted, place.preset, place.start, place.sets, report, unfinished)


def show(results: dict[str, Any], console: Console) -> None:
    """The tables, on the terminal."""
    for table in terminal(tables(results)):
        console.print(table)
    if results["not_yet"]:
        console.print(f"{len(results['not_yet'])} trials are left: go on with --resume")
    if results["known_elsewhere"]:
        count, first = len(results["known_elsewhere"]), results["known_elsewhere"][0]
        console.print(
            f"{count} runs of --known are not among those that were looked for, as {first}", markup=False
        )
