"""Means over seeds, methods against each other, problem by problem, and collapses counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from adpo.experiments.statistics import interval

DRAWS = 2000
KEYS = ("study", "method", "rate", "inner", "changes")
"""What tells the lines of a table apart."""
OURS = ("ADPO", "ADPO Plackett-Luce")


class Difference(NamedTuple):
    """In accuracy, with a 95 % interval over problems and seeds, drawn anew together."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


def chosen_rates(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each method the learning rate whose short run ended best on the problems that are watched."""
    best: dict[str, tuple[float, float]] = {}
    for run in runs:
        method, rate = run["trial"]["method"], run["trial"]["rate"]
        reached = run["curve"][-1][1] if run["curve"] else 0.0
        if method not in best or reached > best[method][0]:
            best[method] = (reached, rate)
    return {method: rate for method, (_, rate) in best.items()}


def collapsed(run: dict[str, Any], start: dict[str, Any]) -> bool:
    """Final accuracy below that of the start, or below half of its own peak."""
    last = run["curve"][-1][1] if run["curve"] else 0.0
    peak = max((value for _, value in run["curve"]), default=0.0)
    return run["stopped"] is not None or last < start["watched"] or last < peak / 2


def rows_of(runs: Sequence[dict[str, Any]], start: dict[str, Any]) -> list[dict[str, Any]]:
    """One line for each method and what a study changes, over its seeds."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        trial = run["trial"]
        key = tuple(trial[name] for name in KEYS)
        together.setdefault(key, []).append(run)
    return [_line(key, group, start) for key, group in together.items()]


def _line(key: tuple[Any, ...], runs: list[dict[str, Any]], start: dict[str, Any]) -> dict[str, Any]:
    line = dict(zip(KEYS, key, strict=True))
    line |= {"seeds": len(runs), "collapsed": sum(collapsed(run, start) for run in runs)}
    for exam in runs[0]["exams"]:
        for measure in runs[0]["exams"][exam]:
            if not measure.startswith("right"):
                line[f"{exam}: {measure}"] = _with_interval([run["exams"][exam][measure] for run in runs])
    for measure in ("entropy", "kl_to_start", "forgetting", "seconds_per_step", "tokens_per_step"):
        if measure in runs[0]:
            line[measure] = _with_interval([run[measure] for run in runs])
    for measure in runs[0]["rollouts"][-1]:
        line[f"last rollouts: {measure}"] = _with_interval([_late(run, measure) for run in runs])
    return line


def _late(run: dict[str, Any], measure: str) -> float:
    """Mean over the last tenth of the rollouts."""
    last = run["rollouts"][-max(1, len(run["rollouts"]) // 10) :]
    return sum(float(each[measure]) for each in last) / len(last)


def _with_interval(values: Sequence[float]) -> list[float]:
    return list(interval(values)) if len(values) > 1 else [values[0], 0.0]


def against(runs: Sequence[dict[str, Any]], exam: str) -> list[dict[str, Any]]:
    """Ours against every other method, in the exam's most likely answers."""
    reported: dict[str, list[str]] = {}
    for run in runs:
        if run["trial"]["study"] == "seeds":
            reported.setdefault(run["trial"]["method"], []).append(run["exams"][exam]["right"])
    return [
        {"ours": ours, "other": other, **found._asdict(), "verdict": found.verdict}
        for ours in OURS
        if ours in reported
        for other in reported
        if other != ours
        for found in [difference(reported[ours], reported[other])]
    ]


def difference(ours: Sequence[str], theirs: Sequence[str], draws: int = DRAWS) -> Difference:
    """Of two methods, a string of 0 and 1 for each seed; problems and seeds are both drawn with replacement.

    >>> difference(["1111", "1110"], ["0000", "0001"], draws=200).verdict
    'ahead'
    """
    draw = torch.Generator().manual_seed(0)
    tables = [torch.tensor([[float(right) for right in seed] for seed in method]) for method in (ours, theirs)]
    problems = tables[0].shape[1]
    places = torch.randint(problems, (draws, problems), generator=draw)
    means = []
    for table in tables:
        of_seeds = table[:, places].mean(2)  # [seeds, draws]
        seeds = torch.randint(len(table), (len(table), draws), generator=draw)
        means.append(of_seeds.gather(0, seeds).mean(0))
    low, high = torch.quantile(means[0] - means[1], torch.tensor([0.025, 0.975])).tolist()
    return Difference(float(tables[0].mean() - tables[1].mean()), low, high)
