"""Means with intervals over seeds, students against their teacher, and the paper's table beside ours."""

from __future__ import annotations

from typing import Any, NamedTuple

from adpo.experiments.distill.protocol import Lesson, Protocol
from adpo.experiments.statistics import interval, paired

KD = "KD, candidates"
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


ANCHORED = ("ADPO anchored target", "ADPO anchored target EMA", "ADPO anchored target, guarded tau")
MOST_KL, LEAST_NDCG, MARGIN = 0.02, 0.995, 0.05
"""What distillation is held to: distance, order of candidates, and return, as a share of the teacher's."""


class Point(NamedTuple):
    """The students of one method in one place of a study."""

    environment: str
    study: str
    value: float  # of what the study changes: states, steps, noise, share of wrong labels, hidden units
    method: str
    found: dict[str, Any]


def points(results: dict[str, Any], protocol: Protocol) -> list[Point]:
    """Of every method in every study."""
    return [
        Point(name, lesson.study, _value(lesson), method, results["outcomes"][outcome_name(name, lesson, method)])
        for name in protocol.environments
        for lesson in protocol.lessons()
        for method in protocol.methods(lesson)
    ]


def outcome_name(name: str, lesson: Lesson, method: str) -> str:
    return f"outcome-{name}-{lesson.name}-{method}"


def _value(lesson: Lesson) -> float:
    course = lesson.course
    changed = {
        "states": lesson.states,
        "steps": course.steps,
        "noise": lesson.noise,
        "wrong": lesson.wrong,
        "small": course.hidden,
    }
    return float(changed.get(lesson.study, 0))


def summarised(results: dict[str, Any], protocol: Protocol) -> list[dict[str, Any]]:
    """One row for each point: intervals over seeds, and shares of what the teacher earns."""
    return [
        {**point._asdict(), "found": None} | _row(point.found, results["own"][point.environment])
        for point in points(results, protocol)
    ]


def _row(found: dict[str, Any], own: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for measure in MEASURES:
        middle = interval(found[measure])
        row[measure], row[f"{measure}_ci"] = middle.mean, middle.half
    for way in ("deterministic", "stochastic"):
        share = interval(_shares(found, own, way))
        row[f"{way}_share"], row[f"{way}_share_ci"] = share.mean, share.half
    return row


def _shares(found: dict[str, Any], own: dict[str, list[float]], way: str) -> list[float]:
    teacher = sum(own[way]) / len(own[way])
    return [value / teacher for value in found[way]]


def claims(results: dict[str, Any], protocol: Protocol) -> list[dict[str, Any]]:
    """What must hold for the anchored target in the main study."""
    told = []
    for point in points(results, protocol):
        if point.study != "main" or point.method not in ANCHORED:
            continue
        own = results["own"][point.environment]
        kl, ndcg = interval(point.found["kl"]).mean, interval(point.found["ndcg"]).mean
        parts = {f"KL to the teacher at most {MOST_KL}": (f"{kl:.4f}", kl <= MOST_KL)}
        parts[f"NDCG at least {LEAST_NDCG}"] = (f"{ndcg:.4f}", ndcg >= LEAST_NDCG)
        for way in ("deterministic", "stochastic"):
            off = interval([share - 1 for share in _shares(point.found, own, way)])
            inside = off.low >= -MARGIN and off.high <= MARGIN
            parts[f"{way} return within {MARGIN:.0%} of the teacher's"] = (
                f"{off.mean:+.1%} ± {off.half:.1%}",
                inside,
            )
        told += [
            {
                "environment": point.environment,
                "method": point.method,
                "claim": claim,
                "found": shown,
                "holds": holds,
            }
            for claim, (shown, holds) in parts.items()
        ]
    return told


def against_kd(results: dict[str, Any], protocol: Protocol) -> list[dict[str, Any]]:
    """The anchored target against the paper's distillation, seed by seed, wherever both were taught."""
    found = {point[:4]: point.found for point in points(results, protocol)}
    rows = []
    for (name, study, value, method), ours in found.items():
        theirs = found.get((name, study, value, KD))
        if method not in ANCHORED or theirs is None:
            continue
        own = results["own"][name]
        shares = [_shares(each, own, "stochastic") for each in (ours, theirs)]
        row = {"environment": name, "study": study, "value": value, "method": method}
        for measure, difference in (
            ("return", paired(*shares)),
            ("kl", paired(theirs["kl"], ours["kl"])),  # how much closer
        ):
            row |= {measure: difference.mean, f"{measure}_ci": difference.half}
            row[f"{measure}_verdict"] = (
                "ahead" if difference.low > 0 else "behind" if difference.high < 0 else "level"
            )
        rows.append(row)
    return rows
