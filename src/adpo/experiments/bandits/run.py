"""``adpo reproduce bandits``: which cells a preset runs, and what becomes of their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adpo.experiments.bandits import jobs, studies
from adpo.experiments.bandits.methods import GRID
from adpo.experiments.bandits.protocol import SCENARIOS, Protocol, Scenario
from adpo.experiments.bandits.summary import METRICS, against_baselines, joined, summarise
from adpo.experiments.bandits.tables import overview, tables, verdicts
from adpo.experiments.cells import Cell, Job, seeds_from
from adpo.experiments.tables import markdown, terminal
from adpo.files import write_json
from adpo.provenance import provenance


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
    "scenarios": Preset(Protocol(), seeds=30, scenarios=SCENARIOS, studies=False),
    "paper": Preset(Protocol(), seeds=10, scenarios=SCENARIOS, studies=True),
}

FIRST_SEED = 100
"""Reported worlds begin here; those before it served the development of the methods."""

OURS = tuple(name for name in GRID if name.startswith("adpo"))
BASELINES = tuple(name for name in GRID if not name.startswith("adpo"))


def cells_of(preset: Preset, seeds: list[int]) -> list[Cell]:
    cells = jobs.main_cells(preset.protocol, seeds, preset.scenarios)
    if preset.studies:
        cells += jobs.capacity_cells(preset.protocol, seeds) + jobs.sensitivity_cells(preset.protocol, seeds)
        cells += studies.popular_cells(seeds) + studies.divergence_cells(preset.protocol, seeds)
        cells += studies.variance_cells(preset.protocol, seeds)
    return cells


@dataclass(frozen=True)
class Order:
    """What the user asked for, beside the preset."""

    out: Path
    resume: bool = False
    workers: int = 1
    on_progress: Callable[[float], None] = lambda _: None  # hears the share of the work that is done

    def carry_out(self, description: dict[str, Any], cells: list[Cell]) -> tuple[Job, dict[str, Any]]:
        job = Job(self.out, description, self.resume, provenance())
        total, done = sum(cell.weight for cell in cells), dict.fromkeys((cell.name for cell in cells), 0.0)

        def progress(cell: Cell, share: float) -> None:
            done[cell.name] = share * cell.weight
            self.on_progress(sum(done.values()) / total)

        # One thread each: small matrices gain nothing from more, and the results are those of any machine's
        # number of cores.
        prepare = partial(torch.set_num_threads, 1)
        return job, job.run(cells, progress, self.workers, prepare)


def reproduce(name: str, seeds: int | None, order: Order, first_seed: int | None = None) -> dict[str, Any]:
    """Run the preset, write ``results.json``, the tables and the figures, and return the results."""
    preset = PRESETS[name]
    used = list(seeds_from(FIRST_SEED if first_seed is None else first_seed, seeds or preset.seeds))
    description = {
        "experiment": "bandits",
        "preset": name,
        "seeds": used,
        "settings": jobs.tuned(),
        **jobs.described(preset.protocol),
    }
    cells = cells_of(preset, used)
    job, found = order.carry_out(description, cells)
    main = joined(found, "main-")
    results = {
        "description": description,
        "provenance": job.provenances(cells),
        "summary": summarise(main),
        "against_baselines": {
            metric: {ours: against_baselines(main, ours, BASELINES, metric) for ours in OURS} for metric in METRICS
        },
        "cells": found,
    }
    write_json(order.out / "results.json", results)
    (order.out / "tables.md").write_text(markdown(tables(results), spaced=True))
    _figures(results, order.out)
    return results


def tune(order: Order) -> Path:
    """The sweep that chose every method's hyper-parameters; writes ``settings.json``."""
    protocol = Protocol()
    description = {
        "experiment": "bandits-tuning",
        "grid": GRID,
        "seeds": list(jobs.TUNING_SEEDS),
        **jobs.described(protocol, jobs.TUNING_SCENARIOS),
    }
    _, found = order.carry_out(description, jobs.tuning_cells(protocol))
    chosen, scores = jobs.best_settings(found)
    path = order.out / "settings.json"
    settings = ",\n".join(f"  {json.dumps(name)}: {json.dumps(chosen[name])}" for name in GRID)
    tried = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(scored)}" for scored in scores[name]) + "\n  ]"
        for name in GRID
    )
    path.write_text(
        '{\n "command": "adpo reproduce bandits --tune",\n'
        f' "settings": {{\n{settings}\n }},\n "sampled_winmass": {{\n{tried}\n }}\n}}\n'
    )
    return path


def show(results: dict[str, Any], console: Console) -> None:
    """The tables, on the terminal."""
    for metric in METRICS:
        console.print(*terminal([overview(results["summary"][metric], metric)], pad_edge=False, padding=(0, 1)))
        console.print(*terminal([verdicts(results["against_baselines"][metric], metric)]))
    description = results["description"]
    if description["preset"] == "smoke":
        iterations, seeds = description["protocol"]["iterations"], len(description["seeds"])
        console.print(
            f"The smoke preset stops after {iterations} of {Protocol().iterations} iterations, {seeds} seeds: "
            "it shows that everything works, not who wins. For that: --preset scenarios."
        )


def _figures(results: dict[str, Any], out: Path) -> None:
    from adpo.experiments.bandits import figures

    figures.robustness(results["summary"], out)
    if "sensitivity" in results["cells"]:
        for draw in (figures.capacity, figures.sensitive, figures.popular, figures.diverging, figures.variance):
            draw(results["cells"], out)
