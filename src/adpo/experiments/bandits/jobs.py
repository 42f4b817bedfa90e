"""The parts of the experiment as cells: one training job each, all methods and seeds of a scenario together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import resources
from typing import Any

from adpo.experiments.bandits.measure import Exam, Measures
from adpo.experiments.bandits.methods import GRID, grid, make
from adpo.experiments.bandits.protocol import SCENARIOS, Protocol, Scenario
from adpo.experiments.bandits.train import Training, train
from adpo.experiments.bandits.world import Replica
from adpo.experiments.workers import Cell, Report

Spec = tuple[str, dict[str, Any]]
"""A method by name and settings: what a cell is told, and can be sent to another process."""

WIDTHS = (64, 128, 256)
"""Of the policy, in the study of capacity."""
SENSITIVITY = {"tau": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0], "beta": [0.25, 0.5, 1.0, 2.0, 4.0]}
TUNING_SEEDS = range(1000, 1004)
TUNING_SCENARIOS = (
    Scenario("gaussian", "mild", noise=0.75, outliers=0.075),
    Scenario("gaussian", "harsh", noise=1.5, outliers=0.15),
    Scenario("shift", "mild", noise=0.5, shift=1.5, scale=0.8),
    Scenario("shift", "harsh", noise=0.5, shift=2.5, scale=0.65),
    Scenario("flips", "mild", noise=0.5, flips=0.15),
    Scenario("flips", "harsh", noise=0.5, flips=0.25),
    Scenario("cauchy", "mild", cauchy=0.5),
    Scenario("cauchy", "harsh", cauchy=1.1),
)
"""Between the reported levels, in worlds that are not reported."""


def tuned() -> dict[str, dict[str, Any]]:
    """The hyper-parameters of the reported runs, as the sweep found them."""
    text = resources.files("adpo.experiments.bandits").joinpath("settings.json").read_text()
    settings: dict[str, dict[str, Any]] = json.loads(text)["settings"]
    return settings


def runs(
    protocol: Protocol,
    scenarios: Sequence[Scenario],
    specs: Sequence[Spec],
    seeds: Sequence[int],
    report: Report = lambda _: None,
) -> list[dict[str, Any]]:
    """Train all methods on all seeds of the scenarios; one record per run, and the reference as a method."""
    methods = [make(name, settings) for name, settings in specs]
    replicas = [Replica(scenario, seed) for scenario in scenarios for seed in seeds]
    points: list[tuple[int, list[Measures]]] = []
    exams: list[Exam] = []

    def observe(iteration: int, state: Training) -> None:
        if not exams:
            exams.append(Exam(state.worlds, state.reference))
        if iteration % protocol.evaluate_every == 0 or iteration == protocol.iterations:
            points.append((iteration, [exams[0].measure(weights) for weights in state.weights]))
            report(iteration / protocol.iterations)

    state = train(protocol, replicas, methods, observe)
    reference = exams[0].measure(state.reference)
    records = []
    for i, replica in enumerate(replicas):
        records.append(_record(replica, "reference", {}, [{"iteration": 0, **_numbers(reference, i)}]))
        for m, method in enumerate(methods):
            curve = [{"iteration": iteration, **_numbers(measures[m], i)} for iteration, measures in points]
            records.append(_record(replica, method.name, method.settings, curve))
    return records


def _record(
    replica: Replica, method: str, settings: dict[str, Any], curve: list[dict[str, Any]]
) -> dict[str, Any]:
    place = {"scenario": replica.scenario.corruption, "level": replica.scenario.level, "seed": replica.seed}
    return {**place, "method": method, "settings": settings, "curve": curve}


def _numbers(measures: Measures, i: int) -> dict[str, float]:
    return {name: round(float(values[i]), 6) for name, values in measures._asdict().items()}


def cell(
    name: str, protocol: Protocol, scenarios: Sequence[Scenario], specs: Sequence[Spec], seeds: Sequence[int]
) -> Cell:
    runs_in_all = len(scenarios) * len(specs) * len(seeds)
    weight = runs_in_all * protocol.iterations * protocol.contexts * (protocol.hidden + 100)
    return Cell(name, partial(runs, protocol, scenarios, specs, seeds), weight)


def tuning_cells(protocol: Protocol) -> list[Cell]:
    """Every setting of every method's grid, on all tuning scenarios and seeds; one method at a time."""
    seeds = list(TUNING_SEEDS)
    return [
        cell(f"tuning-{name}", protocol, TUNING_SCENARIOS, [(name, s) for s in grid(name)], seeds) for name in GRID
    ]


def best_settings(results: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, list[Any]]]:
    """For each method the setting with the highest sampled WinMass, mean over tuning scenarios and seeds.

    And all settings with their score, best first.
    """
    totals: dict[str, dict[str, list[float]]] = {}
    for records in results.values():
        for record in records:
            if record["method"] != "reference":
                settings = json.dumps(record["settings"], sort_keys=True)
                scores = totals.setdefault(record["method"], {}).setdefault(settings, [])
                scores.append(record["curve"][-1]["sampled"])
    ranked = {
        method: sorted(
            ([round(sum(values) / len(values), 4), json.loads(key)] for key, values in settings.items()),
            key=lambda scored: -scored[0],
        )
        for method, settings in totals.items()
    }
    return {method: scored[0][1] for method, scored in ranked.items()}, ranked


def described(protocol: Protocol, scenarios: Sequence[Scenario] = SCENARIOS) -> dict[str, Any]:
    """The protocol in full, for the results file."""
    return {"protocol": asdict(protocol), "scenarios": [asdict(scenario) for scenario in scenarios]}
