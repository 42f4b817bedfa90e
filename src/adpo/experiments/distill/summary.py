"""Means with intervals over seeds, students against their teacher, and the paper's table beside ours."""

from __future__ import annotations

from typing import Any

from adpo.experiments.distill.protocol import Lesson, Protocol
from adpo.experiments.rows import Rows
from adpo.experiments.statistics import Interval, interval, paired, verdict

KD = "KD, candidates"
WAYS = ("deterministic", "stochastic")
MEASURES = ("deterministic", "stochastic", "kl", "reverse_kl", "ndcg", "std", "teacher_std")
KEYS = ("environment", "study", "value", "method")
"""What tells rows apart; ``value`` is what the study sets: states, steps, noise, share of wrong labels, units."""
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


def measured(results: dict[str, Any], protocol: Protocol) -> Rows:
    """One row for each method in each place of a study: its measures, each a list over seeds.

    A return is also given as a share of what the teacher earns.
    """
    rows = []
    for name in protocol.environments:
        teacher = {way: sum(earned) / len(earned) for way, earned in results["own"][name].items()}
        for lesson in protocol.lessons():
            for method in protocol.methods(lesson):
                found = results["outcomes"][outcome_name(name, lesson, method)]
                shares = {f"{way}_share": [value / teacher[way] for value in found[way]] for way in WAYS}
                key = zip(KEYS, (name, lesson.study, _value(lesson), method), strict=True)
                rows.append({**dict(key), **{measure: found[measure] for measure in MEASURES}, **shares})
    return rows


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
    """One row for each place and method: intervals over seeds."""
    rows = []
    for row in measured(results, protocol):
        shown = {key: row[key] for key in KEYS} | {"found": None}
        for measure in (name for name in row if name not in KEYS):
            shown[measure], shown[f"{measure}_ci"] = interval(row[measure])
        rows.append(shown)
    return rows


def claims(results: dict[str, Any], protocol: Protocol) -> list[dict[str, Any]]:
    """What must hold for the anchored target in the main study."""
    told = []
    for row in measured(results, protocol):
        if row["study"] != "main" or row["method"] not in ANCHORED:
            continue
        kl, ndcg = interval(row["kl"]).mean, interval(row["ndcg"]).mean
        checked = [(f"KL to the teacher at most {MOST_KL}", f"{kl:.4f}", kl <= MOST_KL)]
        checked.append((f"NDCG at least {LEAST_NDCG}", f"{ndcg:.4f}", ndcg >= LEAST_NDCG))
        for way in WAYS:
            off = interval([share - 1 for share in row[f"{way}_share"]])
            claim = f"{way} return within {MARGIN:.0%} of the teacher's"
            checked.append((claim, f"{off:+.1%}", off.low >= -MARGIN and off.high <= MARGIN))
        told += [
            {
                "environment": row["environment"],
                "method": row["method"],
                "claim": claim,
                "found": shown,
                "holds": holds,
            }
            for claim, shown, holds in checked
        ]
    return told


def against_kd(results: dict[str, Any], protocol: Protocol) -> list[dict[str, Any]]:
    """The anchored target against the paper's distillation, seed by seed, wherever both were taught."""
    rows = {tuple(row[key] for key in KEYS): row for row in measured(results, protocol)}
    compared = []
    for place, ours in rows.items():
        theirs = rows.get((*place[:-1], KD))
        if ours["method"] not in ANCHORED or theirs is None:
            continue
        row = dict(zip(KEYS, place, strict=True))
        row |= _difference("return", paired(ours["stochastic_share"], theirs["stochastic_share"]))
        row |= _difference("kl", paired(theirs["kl"], ours["kl"]))  # how much closer
        compared.append(row)
    return compared


def _difference(measure: str, found: Interval) -> dict[str, Any]:
    return {
        measure: found.mean,
        f"{measure}_ci": found.half,
        f"{measure}_verdict": verdict(found.low, found.high),
    }
