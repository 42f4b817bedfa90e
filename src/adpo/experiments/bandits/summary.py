"""From the records of runs to tables: means with intervals, the best baseline, paired comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from adpo.experiments.bandits.protocol import SCENARIOS
from adpo.experiments.bandits.statistics import Interval, holm, interval, paired, paired_p

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


def against_best(records: Records, ours: str, baselines: Sequence[str], metric: str) -> dict[str, Any]:
    """In each scenario: our method less the baseline with the highest mean, paired over seeds, Holm-corrected."""
    found: dict[str, Any] = {}
    p_values = []
    for scenario in scenarios_in(records):
        values = final_values(records, scenario, ours, metric)
        theirs = {name: final_values(records, scenario, name, metric) for name in baselines}
        best = max(theirs, key=lambda name: sum(theirs[name]))
        difference = paired(values, theirs[best])
        p_values.append(paired_p(values, theirs[best]))
        found[scenario] = {"baseline": best, "difference": difference.mean, "half": difference.half}
    for scenario, p in zip(found, holm(p_values), strict=True):
        found[scenario]["holm_p"] = p
    return found


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
