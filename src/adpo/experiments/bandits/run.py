"""``adpo reproduce bandits``: which cells a preset runs, and what becomes of their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from adpo.experiments.bandits import jobs, studies
from adpo.experiments.bandits.methods import DIVERGENCES, GRID
from adpo.experiments.bandits.protocol import MEDIUM, SCENARIOS, Protocol, Scenario
from adpo.experiments.bandits.summary import METRICS, against_baselines, joined, summarise
from adpo.experiments.bandits.tables import overview, tables, verdicts
from adpo.experiments.seeds import seeds_from
from adpo.experiments.session import Options, Session, one_thread
from adpo.experiments.tables import markdown, terminal
from adpo.experiments.workers import Cell
from adpo.system.files import write_json, write_text

Order = Options


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
        scenarios=tuple(MEDIUM.values()),
        studies=False,
    ),
    "scenarios": Preset(Protocol(), seeds=30, scenarios=SCENARIOS, studies=False),
    "paper": Preset(Protocol(), seeds=10, scenarios=SCENARIOS, studies=True),
}

FIRST_SEED = 100
"""Reported worlds begin here; those before it served the development of the methods."""

OURS = tuple(name for name in GRID if name.startswith("adpo"))
BASELINES = tuple(name for name in GRID if not name.startswith("adpo"))


def cells_of(preset: Preset, seeds: list[int]) -> Iterator[Cell]:
    """Every method in every scenario; then the studies."""
    protocol, chosen = preset.protocol, jobs.tuned()
    specs = [(name, chosen[name]) for name in GRID]
    for scenario in preset.scenarios:
        yield jobs.cell(f"main-{scenario.name}", protocol, [scenario], specs, seeds)
    if not preset.studies:
        return
    for hidden, corruption in product(jobs.WIDTHS, ("gaussian", "cauchy")):  # the paper's "Heavy Noise-Medium"
        scenario, wider = MEDIUM[corruption], replace(protocol, hidden=hidden)
        yield jobs.cell(f"capacity-{hidden}-{scenario.name}", wider, [scenario], specs, seeds)
    axes = product(jobs.SENSITIVITY["beta"], jobs.SENSITIVITY["tau"])
    tried = [("adpo-kde", {"beta": beta, "tau": tau}) for beta, tau in axes]
    yield jobs.cell("sensitivity", protocol, [MEDIUM["gaussian"]], tried, seeds)
    for kind, mass in product(("bad", "mediocre"), (0.5, 0.8, 0.95)):  # of the reference, on wrong items
        popular = partial(studies.popular_but_wrong, studies.Popular(), kind, mass, seeds)
        yield Cell(f"popular-{kind}-{mass}", popular)
    by_divergence = [("adpo-divergence", {"divergence": each, **chosen["adpo-kde"]}) for each in DIVERGENCES]
    for scenario in MEDIUM.values():
        yield jobs.cell(f"divergences-{scenario.name}", protocol, [scenario], by_divergence, seeds)
    for moment in ("start", "middle"):
        yield Cell(f"variance-{moment}", partial(studies.gradient_variance, protocol, moment, seeds))


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
    session = Session(order, description)
    found = session.run(list(cells_of(preset, used)), one_thread)
    main = joined(found, "main-")
    results = {
        "description": description,
        "provenance": session.provenances(),
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
    found = Session(order, description).run(jobs.tuning_cells(protocol), one_thread)
    chosen, scores = jobs.best_settings(found)
    path = order.out / "settings.json"
    tuned = {"command": "adpo reproduce bandits --tune", "settings": chosen, "sampled_winmass": scores}
    write_text(path, json.dumps(tuned, indent=1) + "\n")  # methods and settings in their order, the best first
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
