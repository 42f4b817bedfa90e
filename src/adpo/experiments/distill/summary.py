"""Means with intervals over seeds, students against their teacher, and the paper's table beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adpo.experiments.distill.methods import methods
from adpo.experiments.distill.protocol import Protocol
from adpo.experiments.statistics import interval

MEASURES = ("deterministic", "stochastic", "kl", "reverse_kl", "ndcg", "std", "teacher_std")
PAPER = {
    "HalfCheetah-v5": {
        "teacher": 8476.5,
        "KD, candidates": (-309.0, 98.2, 0.857, 30.50),
        "ADPO self-anchor": (279.3, 53.2, 0.765, 10.45),
        "ADPO self-anchor EMA": (166.8, 227.0, 0.858, 0.62),
    },
    "Hopper-v5": {
        "teacher": 1169.8,
        "KD, candidates": (36.9, 20.2, 0.799, 16.98),
        "ADPO self-anchor": (177.3, 158.4, 0.684, 7.61),
        "ADPO self-anchor EMA": (855.6, 269.1, 0.755, 3.97),
    },
}
"""Return and its spread, NDCG, KL, as the paper prints them."""


def summarised(results: dict[str, Any], protocol: Protocol) -> list[dict[str, Any]]:
    """One row for each environment, study and method."""
    rows = []
    for name in protocol.environments:
        own = results["own"][name]
        for lesson in protocol.lessons():
            for method in methods():
                found = results["outcomes"][f"outcome-{name}-{lesson.name}-{method}"]
                row = {"environment": name, "study": lesson.study, "lesson": lesson.name, "method": method}
                rows.append(row | _row(found, own))
                rows += [
                    row | {"study": "steps", "lesson": steps} | _row(on_the_way, own)
                    for steps, on_the_way in found["curve"].items()
                ]
    return rows


def _row(found: dict[str, Any], own: dict[str, list[float]]) -> dict[str, Any]:
    """Intervals over seeds; shares of what the teacher earns."""
    row: dict[str, Any] = {}
    for measure in MEASURES:
        values: Sequence[float] = found[measure]
        middle = interval(values)
        row[measure], row[f"{measure}_ci"] = middle.mean, middle.half
    for way in ("deterministic", "stochastic"):
        teacher = sum(own[way]) / len(own[way])
        share = interval([value / teacher for value in found[way]])
        row[f"{way}_share"], row[f"{way}_share_ci"] = share.mean, share.half
    return row
