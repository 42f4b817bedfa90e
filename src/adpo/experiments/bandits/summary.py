"""From the records of runs to tables: means with intervals, the best baseline, paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from adpo.experiments.bandits.protocol import SCENARIOS
from adpo.experiments.statistics import Interval, holm, interval, paired, paired_p

Records = list[dict[str, Any]]
METRICS = ("sampled", "greedy", "calibrated")


def final_values(records: Records, scenario: str, method: str, metric: str) -> list[float]:
    """The metric at the end of training, in the order of seeds."""
    chosen = [r for r in records if f"{r['scenario']}-{r['level']}" == scenario and r["method"] == method]
    return [r["curve"][-1][metric] for r in sorted(chosen, key=lambda record: record["seed"])]


def methods_in(records: Records) -> list[str]:
    return list(dict.fromkeys(record["method"] for record in records))


def scenarios_in(records: Records) -> list[str]:
    return list(dict.fromkeys(f"{record['scenario']}-{record['level']}" for record in records))


def summarise(records: Records) -> dict[str, Any]:
    """Mean and interval of every method in every scenario, and over all scenarios (seed by seed)."""
    table: dict[str, Any] = {}
    scenarios = scenarios_in(records)
    for metric in METRICS:
        for method in methods_in(records):
            rows = {s: final_values(records, s, method, metric) for s in scenarios}
            overall = [sum(values) / len(values) for values in zip(*rows.values(), strict=True)]
            cells = {scenario: _pair(interval(values)) for scenario, values in rows.items()}
            table.setdefault(metric, {})[method] = {**cells, "all": _pair(interval(overall))}
    return table


def against_baselines(records: Records, ours: str, baselines: Sequence[str], metric: str) -> dict[str, Any]:
    """In each scenario: our method less each baseline, paired over seeds; the one that comes closest is kept.

    Closest is the baseline whose interval reaches lowest. p-values are Holm-corrected over the scenarios.
    """
    found: dict[str, Any] = {}
    for scenario in scenarios_in(records):
        values = final_values(records, scenario, ours, metric)
        theirs = {name: final_values(records, scenario, name, metric) for name in baselines}
        differences = {name: paired(values, other) for name, other in theirs.items()}
        closest = min(differences, key=lambda name: differences[name].low)
        mean, half = _pair(differences[closest])
        p_value = paired_p(values, theirs[closest])
        found[scenario] = {"baseline": closest, "difference": mean, "half": half, "p": p_value}
    for cell, p in zip(found.values(), holm([cell["p"] for cell in found.values()]), strict=True):
        cell["holm_p"] = p
    return found


MARGIN = 0.02
"""How far below the closest baseline an interval may reach and still count as level with it."""


def verdict_table(verdicts: dict[str, Any], metric: str) -> Table:
    """For each of our methods: in how many scenarios it is better than, or level with, every baseline."""
    title = f"ADPO less the closest baseline, {metric}: 95 % paired intervals"
    table = Table("method", "above 0", f"above -{MARGIN}", "lowest", "in", "against", title=title)
    for ours, scenarios in verdicts.items():
        lows = {scenario: cell["difference"] - cell["half"] for scenario, cell in scenarios.items()}
        worst = min(lows, key=lambda scenario: lows[scenario])
        above = [sum(low > bound for low in lows.values()) for bound in (0, -MARGIN)]
        table.add_row(
            ours,
            *(f"{count} of {len(lows)}" for count in above),
            f"{lows[worst]:+.3f}",
            worst,
            scenarios[worst]["baseline"],
        )
    return table


def terminal_table(summary: dict[str, Any], metric: str, title: str) -> Table:
    """Methods by scenarios; the best mean of each column in bold."""
    rows = summary[metric]
    columns = [name for name in next(iter(rows.values())) if name != "all"]
    table = Table(
        "method", *(_short(name) for name in columns), "mean", title=title, pad_edge=False, padding=(0, 1)
    )
    best = {c: max(rows, key=lambda method, c=c: rows[method][c][0]) for c in [*columns, "all"]}  # type: ignore[misc]
    for method, cells in rows.items():
        shown = [
            f"[bold]{cells[c][0]:.3f}[/bold]" if best[c] == method else f"{cells[c][0]:.3f}"
            for c in [*columns, "all"]
        ]
        table.add_row(method, *shown)
    return table


def _short(scenario: str) -> str:
    order = {s.name: f"{s.corruption[:5]} {s.level[:1].upper()}" for s in SCENARIOS}
    return order.get(scenario, scenario)


def _pair(found: Interval) -> list[float]:
    return [round(found.mean, 6), round(found.half, 6)]
