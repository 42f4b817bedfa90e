"""``adpo reproduce bandits``: which cells a preset runs, and what becomes of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from adpo.experiments.bandits import jobs, studies
from adpo.experiments.bandits.methods import GRID
from adpo.experiments.bandits.protocol import SCENARIOS, Protocol, Scenario
from adpo.experiments.bandits.summary import METRICS, against_best, summarise, terminal_table
from adpo.experiments.cells import Cell, Job, write_json
from adpo.experiments.provenance import provenance


@dataclass(frozen=True)
class Preset:
    """How much of the experiment is run."""

    protocol: Protocol
    seeds: int
    scenarios: tuple[Scenario, ...]
    studies: bool  # capacity, sensitivity, popular but wrong, divergences and gradient variance as well


PRESETS = {
    "smoke": Preset(
        replace(Protocol(), iterations=40, test_contexts=300, held_out_lists=300),
        seeds=3,
        scenarios=tuple(s for s in SCENARIOS if s.level == "medium"),
        studies=False,
    ),
    "paper": Preset(Protocol(), seeds=10, scenarios=SCENARIOS, studies=True),
}

OURS = tuple(name for name in GRID if name.startswith("adpo"))
BASELINES = tuple(name for name in GRID if not name.startswith("adpo"))


def cells_of(preset: Preset, seeds: range) -> list[Cell]:
    cells = jobs.main_cells(preset.protocol, seeds, preset.scenarios)
    if preset.studies:
        cells += jobs.capacity_cells(preset.protocol, seeds) + jobs.sensitivity_cells(preset.protocol, seeds)
        cells += studies.popular_cells(seeds) + studies.divergence_cells(preset.protocol, seeds)
        cells += studies.variance_cells(preset.protocol, seeds)
    return cells


def reproduce(
    name: str,
    seeds: int | None,
    out: Path,
    resume: bool,
    on_start: Callable[[int], None],
    on_cell: Callable[[], None],
) -> dict[str, Any]:
    """Run the preset, write ``results.json`` and the figures, and return the results."""
    preset = PRESETS[name]
    used = range(seeds or preset.seeds)
    description = {
        "experiment": "bandits",
        "preset": name,
        "seeds": list(used),
        "settings": jobs.tuned(),
        **jobs.described(preset.protocol),
    }
    job = Job(out, description, resume)
    cells = cells_of(preset, used)
    on_start(len(cells))
    found = job.run(cells, lambda *_: on_cell())
    main = [record for cell, records in found.items() if cell.startswith("main-") for record in records]
    results = {
        "description": description,
        "provenance": provenance(),
        "summary": summarise(main),
        "against_best_baseline": {
            metric: {ours: against_best(main, ours, BASELINES, metric) for ours in OURS} for metric in METRICS
        },
        "cells": found,
    }
    write_json(out / "results.json", results)
    _figures(results, out)
    return results


def tune(out: Path, resume: bool, on_start: Callable[[int], None], on_cell: Callable[[], None]) -> Path:
    """The sweep that chose every method's hyper-parameters; writes ``settings.json``."""
    protocol = Protocol()
    description = {"experiment": "bandits-tuning", "grid": GRID, **jobs.described(protocol)}
    job = Job(out, description, resume)
    cells = jobs.tuning_cells(protocol)
    on_start(len(cells))
    found = job.run(cells, lambda *_: on_cell())
    path = out / "settings.json"
    chosen = jobs.best_settings(found)
    write_json(
        path, {"command": "adpo reproduce bandits --tune", "settings": {name: chosen[name] for name in GRID}}
    )
    return path


def show(results: dict[str, Any], console: Console) -> None:
    """The tables, on the terminal."""
    for metric in METRICS:
        console.print(terminal_table(results["summary"], metric, f"WinMass, {metric} (mean over seeds)"))
    verdicts = results["against_best_baseline"]["sampled"]
    for ours, scenarios in verdicts.items():
        above = sum(cell["difference"] - cell["half"] > 0 for cell in scenarios.values())
        close = sum(cell["difference"] - cell["half"] > -0.02 for cell in scenarios.values())
        console.print(
            f"{ours}: (ours - best baseline), sampled, 95 % interval: above 0 in {above}, above -0.02 in {close}"
            f" of {len(scenarios)} scenarios"
        )


def _figures(results: dict[str, Any], out: Path) -> None:
    from adpo.experiments.bandits import figures

    figures.robustness(results["summary"], out)
    cells = results["cells"]
    if _named(cells, "capacity-"):
        figures.capacity(_named(cells, "capacity-"), out)
    if "sensitivity" in cells:
        figures.sensitivity(cells["sensitivity"], out)
        figures.popular(_named(cells, "popular-"), out)
        figures.divergences(cells["divergences"], out)
        figures.variance(_named(cells, "variance-"), out)


def _named(cells: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): records for name, records in cells.items() if name.startswith(prefix)}
