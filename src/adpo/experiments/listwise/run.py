"""Which cells a preset runs, in which order, and what becomes of their results.

First the reference, then the sweep, then the reported runs with the settings that the sweep chose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from adpo.experiments.listwise import data
from adpo.experiments.listwise.experiment import Experiment
from adpo.experiments.listwise.methods import METHODS
from adpo.experiments.listwise.models import digest
from adpo.experiments.listwise.protocol import FIRST_SEED, PRESETS, Preset, Protocol
from adpo.experiments.listwise.summary import BASELINES, against, summarise
from adpo.experiments.listwise.tables import tables
from adpo.experiments.listwise.train import Setting
from adpo.experiments.session import Options, Session
from adpo.experiments.tables import markdown
from adpo.experiments.workers import Cell, Report
from adpo.system.files import write_json


@dataclass(frozen=True)
class Order(Options):
    """What the user asked for; ``workers`` are processes side by side on the device."""

    data: Path | None = None
    model: Path | None = None
    preset: str = "gpu"
    methods: tuple[str, ...] | None = None  # instead of the preset's
    seeds: int | None = None  # instead of the preset's number
    first_seed: int = FIRST_SEED
    tokens: int | None = None  # instead of the preset's, per reported run
    budget_seconds: float = math.inf
    say: Callable[[str], None] = lambda _: None  # is given a line for every cell that ends
    started: float = field(default_factory=time.monotonic)

    def seeds_of(self, preset: Preset) -> range:
        return range(self.first_seed, self.first_seed + preset.seeds)

    def chosen(self) -> Preset:
        """The preset with what the user wants changed in it."""
        preset = PRESETS[self.preset]
        if self.preset != "smoke" and (self.data is None or self.model is None):
            raise ValueError(f"--preset {self.preset} needs --data and --model")
        unknown = [name for name in self.methods or () if name not in METHODS]
        if unknown:
            raise ValueError(f"--methods: unknown {', '.join(unknown)}; known are {', '.join(METHODS)}")
        protocol = replace(preset.protocol, tokens=self.tokens or preset.protocol.tokens)
        return Preset(protocol, self.seeds or preset.seeds, self.methods or preset.methods)


class Place(NamedTuple):
    """What a cell needs, in whichever process it is computed."""

    lists: Path | None
    model: Path | None
    protocol: Protocol

    def listings(self) -> list[data.Listing]:
        return data.synthetic() if self.lists is None else data.load(self.lists)


@lru_cache(maxsize=1)
def _experiment(place: Place) -> Experiment:
    return Experiment(place.listings(), place.model, place.protocol)


def _computed(place: Place, kind: str, arguments: dict[str, Any], _: Report) -> Any:
    return getattr(_experiment(place), kind)(**arguments)


class OutOfTime(Exception):  # noqa: N818  (nothing went wrong)
    """The budget does not hold another cell."""


def settings(method: str, protocol: Protocol) -> list[Setting]:
    """What the sweep tries."""
    strengths = METHODS[method].strengths[: protocol.strengths]
    return [Setting(strength, rate) for rate in protocol.learning_rates for strength in strengths]


def reproduce(order: Order) -> dict[str, Any] | None:
    """Run what is missing, write ``results.json`` and ``tables.md``; the results, or None when out of time."""
    preset = order.chosen()
    place = Place(order.data, order.model, preset.protocol)
    data.split(place.listings(), preset.protocol.validation, preset.protocol.test)
    settled = {  # methods and seeds may be added later
        "experiment": "listwise",
        "preset": order.preset,
        "data": digest(order.data),
        "model": digest(order.model),
        "protocol": asdict(preset.protocol),
    }
    tried = sum(len(settings(name, preset.protocol)) for name in preset.methods)
    total = 1 + tried + len(preset.methods) * preset.seeds

    def on_end(cell: Cell) -> None:
        since = time.monotonic() - order.started
        line = f"{len(session.ended)} of {total} ({since:.0f} s)  {cell.name}"
        order.say(line + _told(session.job.result(cell), session.job.seconds(cell)))

    end = order.started + order.budget_seconds
    session = Session(order, settled, weight=total, end=end, in_time=True, on_end=on_end)
    seeds = list(order.seeds_of(preset))
    description = {**settled, "methods": list(preset.methods), "seeds": seeds}
    try:
        results = {"description": description, **_carried_out(session, place, preset.methods, seeds)}
    except OutOfTime:
        order.say(f"{total - len(session.ended)} of {total} cells left: go on with --resume")
        return None
    write_json(order.out / "results.json", results)
    (order.out / "tables.md").write_text(markdown(tables(results), spaced=True))
    return results


def _told(found: dict[str, Any], seconds: float) -> str:
    """The rest of a cell's line."""
    if "trained" not in found:
        return f"  {seconds:.1f} s"
    speed, refused = found["trained"]["tokens"] / seconds, found["trained"]["refused"]
    line = f"  {seconds:.1f} s, {speed:,.0f} tokens/s, {_accuracy(found):.3f} of pairs in order"
    return line + (f", {refused} steps refused" if refused else "")


def _carried_out(session: Session, place: Place, methods: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Reference, sweep, reported runs."""

    def results(cells: list[Cell]) -> list[dict[str, Any]]:
        found = session.run(cells)
        if session.pending:
            raise OutOfTime
        return [found[cell.name] for cell in cells]

    (reference,) = results([Cell("reference", partial(_computed, place, "reference", {}))])
    cell = partial(_cell, place, reference.pop("seq_logp"))
    offered = [(name, setting) for name in methods for setting in settings(name, place.protocol)]
    tried: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for (name, setting), found in zip(offered, results([cell("sweep", *each) for each in offered]), strict=True):
        tried[name].append({**asdict(setting), "validation": round(_accuracy(found), 6)})
    best = {name: max(scored, key=lambda one: float(one["validation"])) for name, scored in tried.items()}
    chosen = [(name, Setting(one["strength"], one["learning_rate"])) for name, one in best.items()]
    runs = results([cell("run", *each, seed) for seed in seeds for each in chosen])
    untrained = reference.pop("test")
    return {
        "provenance": session.provenances(),
        "corpus": reference,
        "sweep": tried,
        "settings": best,
        "summary": summarise(runs, untrained),
        "against": {baseline: against(runs, baseline) for baseline in BASELINES if baseline in methods},
        "runs": [_shortened(run) for run in runs],
    }


def _cell(
    place: Place, ref_logp: list[float], kind: str, method: str, setting: Setting, seed: int | None = None
) -> Cell:
    arguments: dict[str, Any] = {"ref_logp": ref_logp, "method": method, "setting": setting}
    name = f"{kind}-{method}-strength-{setting.strength:g}-rate-{setting.learning_rate:g}"
    if seed is not None:
        arguments, name = {**arguments, "seed": seed}, f"{name}-seed-{seed}"
    return Cell(name, partial(_computed, place, kind, arguments))


def _accuracy(run: dict[str, Any]) -> float:
    """Pairs in order by the method's own score, mean over prompts: what the sweep goes by."""
    return _mean(run["measures"][METHODS[run["method"]].score]["pair_accuracy"])


def _shortened(run: dict[str, Any]) -> dict[str, Any]:
    """Means instead of one value per prompt; those stay in the files of the cells."""
    measures = {
        score: {measure: round(_mean(values), 6) for measure, values in by_measure.items()}
        for score, by_measure in run["measures"].items()
    }
    return {**run, "measures": measures}


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known)
