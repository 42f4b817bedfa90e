"""The results as tables: on the terminal, and as `docs/results/listwise.md` quotes them."""

from __future__ import annotations

from typing import Any

from adpo.experiments.listwise.measure import MEASURES
from adpo.experiments.rows import Row, Rows, where
from adpo.experiments.tables import Columns, Lines, table

TITLES = dict(
    zip(MEASURES, ("pairs in order", "of them, better not longer", "NDCG@16", "best first"), strict=True)
)
SCORES = {
    "own": "Held-out prompts, each method by its own score",
    "log_ratio": "Held-out prompts, by log-ratio to the starting model",
    "mean_logp": "Held-out prompts, by mean log-probability per token",
}


def tables(results: dict[str, Any]) -> list[Lines]:
    methods = results["description"]["methods"]
    scored = {name: results["summary"][name] for name in ("length", "reference", *methods)}
    made = [
        _measures(title, {name: cells[score] for name, cells in scored.items() if score in cells}, MEAN)
        for score, title in SCORES.items()
    ]
    for baseline, cells in results["against"].items():
        others = {name: cells[name] for name in methods if name in cells}
        made.append(_measures(f"Each method less {baseline}, paired", others, DIFFERENCE))
    return [*made, _settings(results)]


MEAN, DIFFERENCE = "{0:.3f} ({1:.3f}–{2:.3f})", "{0:+.3f} ({1:+.3f} to {2:+.3f})"


def _measures(title: str, cells: dict[str, Any], form: str) -> Lines:
    """A line for each method; ``cells`` are its intervals by measure."""
    lines = [[method, *(form.format(*cells[method][measure]) for measure in MEASURES)] for method in cells]
    return Lines(title, ["method", *TITLES.values()], lines)


def _settings(results: dict[str, Any]) -> Lines:
    columns: Columns = [
        ("method", "{method}"),
        ("strength", "{strength:g}"),
        ("learning rate", "{learning_rate:g}"),
        ("validation", "{validation:.3f}"),
        ("steps", "{trained[steps]:,.0f}"),
        ("tokens", "{trained[tokens]:,.0f}"),
        ("lists or pairs", "{trained[lists]:,.0f}"),
        ("refused", "{refused}"),
        ("log-ratio, best", "{drift[best]:+.1f}"),
        ("log-ratio, all", "{drift[all]:+.1f}"),
    ]
    rows = []
    for method in results["description"]["methods"]:
        runs = where(results["runs"], method=method)
        refused = sum(run["trained"]["refused"] for run in runs)
        means = {part: _means(runs, part) for part in ("trained", "drift")}
        rows.append({"method": method, "refused": refused, **results["settings"][method], **means})
    return table("Chosen settings, work done, and how far the log-probabilities moved", columns, rows)


def _means(runs: Rows, part: str) -> Row:
    return {key: sum(float(run[part][key]) for run in runs) / len(runs) for key in runs[0][part]}
