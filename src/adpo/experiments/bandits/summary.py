"""From the records of runs to figures: means with intervals, the best baseline, paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from adpo.experiments.bandits.jobs import SENSITIVITY, WIDTHS
from adpo.experiments.bandits.studies import COLLAPSED
from adpo.experiments.rows import Rows, column, grouped, where
from adpo.experiments.statistics import Interval, holm, interval, means, paired, paired_p

Records = list[dict[str, Any]]
METRICS = ("sampled", "greedy", "calibrated")


def at_the_end(records: Records) -> Rows:
    """One row per run, in the order of seeds: scenario with its level, method, settings, the last measures."""
    rows = [
        {**record, "scenario": f"{record['scenario']}-{record['level']}", **record["curve"][-1]}
        for record in records
    ]
    return sorted(rows, key=lambda row: int(row["seed"]))


def summarise(records: Records) -> dict[str, Any]:
    """Mean and interval of every method in every scenario, and over all scenarios (seed by seed)."""
    table: dict[str, Any] = {metric: {} for metric in METRICS}
    for method, runs in grouped(at_the_end(records), "method").items():
        for metric in METRICS:
            values = {name: column(here, metric) for name, here in grouped(runs, "scenario").items()}
            overall = [sum(seed) / len(seed) for seed in zip(*values.values(), strict=True)]
            table[metric][method] = {
                name: _pair(interval(each)) for name, each in {**values, "all": overall}.items()
            }
    return table


def against_baselines(records: Records, ours: str, baselines: Sequence[str], metric: str) -> dict[str, Any]:
    """In each scenario: our method less each baseline, paired over seeds; the one that comes closest is kept.

    Closest is the baseline whose interval reaches lowest. p-values are Holm-corrected over the scenarios.
    """
    found: dict[str, Any] = {}
    for scenario, runs in grouped(at_the_end(records), "scenario").items():
        values = {method: column(mine, metric) for method, mine in grouped(runs, "method").items()}
        differences = {name: paired(values[ours], values[name]) for name in baselines}
        closest = min(differences, key=lambda name: differences[name].low)
        mean, half = _pair(differences[closest])
        p_value = paired_p(values[ours], values[closest])
        found[scenario] = {"baseline": closest, "difference": mean, "half": half, "p": p_value}
    for cell, p in zip(found.values(), holm([cell["p"] for cell in found.values()]), strict=True):
        cell["holm_p"] = p
    return found


def joined(cells: dict[str, Records], prefix: str, field: str = "cell") -> Records:
    """Of the cells whose name begins with ``prefix``; the rest of the name becomes a field of the record."""
    return [
        {**record, field: name.removeprefix(prefix)}
        for name, records in cells.items()
        if name.startswith(prefix)
        for record in records
    ]


def by_width(cells: dict[str, Records]) -> Rows:
    """The runs of the study of capacity."""
    return [
        {**row, "hidden": hidden} for hidden in WIDTHS for row in at_the_end(joined(cells, f"capacity-{hidden}-"))
    ]


def sensitivity(records: Records, metric: str) -> list[list[float]]:
    """Means over seeds, a row for each tau and a column for each beta."""
    rows = at_the_end(records)
    values = {
        (tau, beta): column(where(rows, settings={"tau": tau, "beta": beta}), metric)
        for tau, beta in product(SENSITIVITY["tau"], SENSITIVITY["beta"])
    }
    return [
        [sum(values[tau, beta]) / len(values[tau, beta]) for beta in SENSITIVITY["beta"]]
        for tau in SENSITIVITY["tau"]
    ]


def divergences(cells: dict[str, Records]) -> Rows:
    """One row for each divergence in each scenario."""
    rows = [
        {**row, "collapsed": float(row["entropy"] < COLLAPSED)}
        for row in at_the_end(joined(cells, "divergences-"))
        if row["method"] != "reference"
    ]
    return means(rows, ("scenario", "method"), ("sampled", "greedy", "entropy", "collapsed"))


def _pair(found: Interval) -> list[float]:
    return [round(found.mean, 6), round(found.half, 6)]
