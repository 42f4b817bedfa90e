"""The parts of the experiment as cells: one training job each, all methods and seeds of a scenario together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from typing import Any

from adpo.experiments.bandits.measure import Exam, Measures
from adpo.experiments.bandits.methods import GRID, Method, grid, make
from adpo.experiments.bandits.protocol import SCENARIOS, Protocol, Scenario
from adpo.experiments.bandits.train import Training, train
from adpo.experiments.bandits.world import Replica
from adpo.experiments.cells import Cell

TUNING_SEEDS = range(1000, 1004)
TUNING_SCENARIOS = (
    Scenario("gaussian", "tuning", noise=0.75, outliers=0.075),
    Scenario("shift", "tuning", noise=0.5, shift=1.5, scale=0.8),
    Scenario("flips", "tuning", noise=0.5, flips=0.15),
    Scenario("cauchy", "tuning", cauchy=0.5),
)
"""Between the reported levels, in worlds that are not reported."""


def tuned() -> dict[str, dict[str, Any]]:
    """The hyper-parameters of the reported runs, as the sweep found them."""
    text = resources.files("adpo.experiments.bandits").joinpath("settings.json").read_text()
    settings: dict[str, dict[str, Any]] = json.loads(text)["settings"]
    return settings


def tuned_methods(names: Sequence[str] | None = None) -> list[Method]:
    chosen = tuned()
    return [make(name, chosen[name]) for name in (names or chosen)]


def runs(
    protocol: Protocol, scenarios: Sequence[Scenario], methods: Sequence[Method], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Train all methods on all seeds of the scenarios; one record per run, and the reference as a method."""
    replicas = [Replica(scenario, seed) for scenario in scenarios for seed in seeds]
    points: list[tuple[int, list[Measures]]] = []
    exams: list[Exam] = []

    def observe(iteration: int, state: Training) -> None:
        if not exams:
            exams.append(Exam(state.worlds, state.reference))
        if iteration % protocol.evaluate_every == 0 or iteration == protocol.iterations:
            points.append((iteration, [exams[0].measure(weights) for weights in state.weights]))

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


def main_cells(protocol: Protocol, seeds: Sequence[int], scenarios: Sequence[Scenario] = SCENARIOS) -> list[Cell]:
    """Every method in every scenario, one corruption at a time."""
    methods = tuned_methods()
    kinds = dict.fromkeys(scenario.corruption for scenario in scenarios)
    return [
        Cell(
            f"main-{kind}", partial(runs, protocol, [s for s in scenarios if s.corruption == kind], methods, seeds)
        )
        for kind in kinds
    ]


def capacity_cells(protocol: Protocol, seeds: Sequence[int]) -> list[Cell]:
    """Both readings of the paper's "Heavy Noise-Medium" at three widths."""
    chosen = [s for s in SCENARIOS if s.level == "medium" and s.corruption in ("gaussian", "cauchy")]
    methods = tuned_methods()
    return [
        Cell(f"capacity-{hidden}", partial(runs, replace(protocol, hidden=hidden), chosen, methods, seeds))
        for hidden in (64, 128, 256)
    ]


SENSITIVITY = {"tau": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0], "beta": [0.25, 0.5, 1.0, 2.0, 4.0]}


def sensitivity_cells(protocol: Protocol, seeds: Sequence[int]) -> list[Cell]:
    """ADPO listwise over tau and beta, medium Gaussian noise."""
    scenario = next(s for s in SCENARIOS if s.name == "gaussian-medium")
    methods = [make("adpo-kde", {"beta": b, "tau": t}) for t in SENSITIVITY["tau"] for b in SENSITIVITY["beta"]]
    return [Cell("sensitivity", partial(runs, protocol, [scenario], methods, seeds))]


def tuning_cells(protocol: Protocol) -> list[Cell]:
    """Every setting of every method's grid, on all tuning scenarios and seeds; one method at a time."""
    return [
        Cell(
            f"tuning-{name}",
            partial(runs, protocol, TUNING_SCENARIOS, [make(name, s) for s in grid(name)], list(TUNING_SEEDS)),
        )
        for name in GRID
    ]


def best_settings(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each method the setting with the highest sampled WinMass, mean over tuning scenarios and seeds."""
    totals: dict[tuple[str, str], list[float]] = {}
    for records in results.values():
        for record in records:
            if record["method"] != "reference":
                key = (record["method"], json.dumps(record["settings"], sort_keys=True))
                totals.setdefault(key, []).append(record["curve"][-1]["sampled"])
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for (method, settings), values in totals.items():
        score = sum(values) / len(values)
        if method not in best or score > best[method][0]:
            best[method] = (score, json.loads(settings))
    return {method: settings for method, (_, settings) in best.items()}


def described(protocol: Protocol) -> dict[str, Any]:
    """The protocol in full, for the results file."""
    return {"protocol": asdict(protocol), "scenarios": [asdict(scenario) for scenario in SCENARIOS]}
