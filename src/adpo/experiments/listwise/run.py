"""Which cells a preset runs, in which order, and what becomes of their results.

First the reference, then the sweep, then the reported runs with the settings that the sweep chose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from adpo.experiments.cells import Cell, Job, Report
from adpo.experiments.listwise import data
from adpo.experiments.listwise.experiment import Experiment
from adpo.experiments.listwise.methods import METHODS
from adpo.experiments.listwise.models import digest
from adpo.experiments.listwise.protocol import FIRST_SEED, PRESETS, Preset, Protocol
from adpo.experiments.listwise.summary import BASELINES, against, summarise
from adpo.experiments.listwise.tables import tables
from adpo.experiments.listwise.train import Setting
from adpo.experiments.tables import markdown
from adpo.files import write_json
from adpo.provenance import provenance


@dataclass(frozen=True)
class Order:
    """What the user asked for."""

    out: Path
    data: Path | None = None
    model: Path | None = None
    preset: str = "gpu"
    methods: tuple[str, ...] | None = None  # instead of the preset's
    seeds: int | None = None  # instead of the preset's number
    first_seed: int = FIRST_SEED
    tokens: int | None = None  # instead of the preset's, per reported run
    resume: bool = False
    budget_seconds: float = math.inf
    workers: int = 1  # processes side by side on the device
    say: Callable[[str], None] = lambda _: None  # hears a line for every cell that ends
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


class OutOfTime(Exception):  # noqa: N818  (nothing went wrong)
    """The budget does not hold another cell."""


_experiment: Experiment | None = None  # of this process, once a cell needs it


def _load(lists: Path | None, model: Path | None, protocol: Protocol) -> None:
    global _experiment
    if _experiment is None:
        _experiment = Experiment(_listings(lists), model, protocol)


def _compute(kind: str, arguments: dict[str, Any], _: Report) -> Any:
    assert _experiment is not None
    return getattr(_experiment, kind)(**arguments)


def _listings(path: Path | None) -> list[data.Listing]:
    return data.synthetic() if path is None else data.load(path)


class Session:
    """One call of the program: the job on disk, the cells it has seen, the time that is left."""

    def __init__(self, order: Order, preset: Preset, job: Job) -> None:
        self.order, self.preset, self.job = order, preset, job
        tried = sum(len(settings(name, preset.protocol)) for name in preset.methods)
        self.total = 1 + tried + len(preset.methods) * preset.seeds
        self.cells: list[Cell] = []  # those whose results are known
        self.longest = 0.0

    def results(self, cells: list[Cell]) -> list[dict[str, Any]]:
        """From disk or computed now; `OutOfTime` where a cell as long as the longest would end too late."""
        known = [cell for cell in cells if (self.job.cells / f"{cell.name}.json").exists()]
        if len(known) < len(cells):
            self._look_at_the_clock()
        prepare = partial(_load, self.order.data, self.order.model, self.preset.protocol)
        ended: set[str] = {cell.name for cell in known}
        phase = time.monotonic()

        def on_progress(cell: Cell, share: float) -> None:
            if share == 1.0 and cell.name not in ended:
                ended.add(cell.name)
                self.longest = max(self.longest, self.job.seconds(cell))
                self._tell(cell, len(self.cells) + len(ended), time.monotonic() - phase)
                if len(ended) < len(cells):
                    self._look_at_the_clock()

        try:
            found = self.job.run(cells, on_progress, self.order.workers, prepare)
        finally:
            self.cells += [cell for cell in cells if cell.name in ended]
        return [found[cell.name] for cell in cells]

    def _look_at_the_clock(self) -> None:
        if time.monotonic() - self.order.started + self.longest > self.order.budget_seconds:
            raise OutOfTime

    def _tell(self, cell: Cell, number: int, since: float) -> None:
        seconds, found = self.job.seconds(cell), self.job.result(cell)
        line = f"{number} of {self.total} ({since:.0f} s)  {cell.name}  {seconds:.1f} s"
        if "trained" in found:
            speed, refused = found["trained"]["tokens"] / seconds, found["trained"]["refused"]
            line += f", {speed:,.0f} tokens/s, {_accuracy(found):.3f} of pairs in order"
            line += f", {refused} steps refused" if refused else ""
        self.order.say(line)


def settings(method: str, protocol: Protocol) -> list[Setting]:
    """What the sweep tries."""
    strengths = METHODS[method].strengths[: protocol.strengths]
    return [Setting(strength, rate) for rate in protocol.learning_rates for strength in strengths]


def reproduce(order: Order) -> dict[str, Any] | None:
    """Run what is missing, write ``results.json`` and ``tables.md``; the results, or None when out of time."""
    preset = order.chosen()
    data.split(_listings(order.data), preset.protocol.validation, preset.protocol.test)
    settled = {  # methods and seeds may be added later
        "experiment": "listwise",
        "preset": order.preset,
        "data": digest(order.data),
        "model": digest(order.model),
        "protocol": asdict(preset.protocol),
    }
    session = Session(order, preset, Job(order.out, settled, order.resume, provenance()))
    seeds = list(order.seeds_of(preset))
    description = {**settled, "methods": list(preset.methods), "seeds": seeds}
    try:
        results = {"description": description, **_carried_out(session)}
    except OutOfTime:
        order.say(f"{session.total - len(session.cells)} of {session.total} cells left: go on with --resume")
        return None
    write_json(order.out / "results.json", results)
    (order.out / "tables.md").write_text(markdown(tables(results), spaced=True))
    return results


def _carried_out(session: Session) -> dict[str, Any]:
    """Reference, sweep, reported runs."""
    methods = session.preset.methods
    (reference,) = session.results([Cell("reference", partial(_compute, "reference", {}))])
    ref_logp = reference.pop("seq_logp")
    offered = [(name, setting) for name in methods for setting in settings(name, session.preset.protocol)]
    cells = [_cell("sweep", ref_logp, name, setting) for name, setting in offered]
    tried: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for (name, setting), found in zip(offered, session.results(cells), strict=True):
        tried[name].append({**asdict(setting), "validation": round(_accuracy(found), 6)})
    best = {name: max(scored, key=lambda one: float(one["validation"])) for name, scored in tried.items()}
    chosen = {name: Setting(best[name]["strength"], best[name]["learning_rate"]) for name in methods}
    seeds = session.order.seeds_of(session.preset)
    runs = session.results(
        [_cell("run", ref_logp, name, chosen[name], seed) for seed in seeds for name in methods]
    )
    untrained = reference.pop("test")
    return {
        "provenance": session.job.provenances(session.cells),
        "corpus": reference,
        "sweep": tried,
        "settings": best,
        "summary": summarise(runs, untrained),
        "against": {baseline: against(runs, baseline) for baseline in BASELINES if baseline in methods},
        "runs": [_shortened(run) for run in runs],
    }


def _cell(kind: str, ref_logp: list[float], method: str, setting: Setting, seed: int | None = None) -> Cell:
    arguments = {"ref_logp": ref_logp, "method": method, "setting": setting}
    name = f"{kind}-{method}-strength-{setting.strength:g}-rate-{setting.learning_rate:g}"
    if seed is not None:
        arguments, name = {**arguments, "seed": seed}, f"{name}-seed-{seed}"
    return Cell(name, partial(_compute, kind, arguments))


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
