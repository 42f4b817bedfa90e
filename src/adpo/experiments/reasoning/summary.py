"""What each method is best with, means over seeds, and collapses counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from adpo.experiments.reasoning.answers import RIGHT, WATCHED, packed
from adpo.experiments.reasoning.protocol import Choice
from adpo.experiments.rows import grouped
from adpo.experiments.statistics import interval

KEYS = ("study", "method", "rate", "inner", "changes")
"""What tells the lines of a table apart."""
AT_THE_END = ("rate_factor", "rounding", "steps_undone")
"""Of what `backtracking` logs."""
OF_A_RUN = ("entropy", "kl_to_start", "forgetting", "seconds_per_step", "tokens_per_step")


def chosen(runs: Sequence[dict[str, Any]]) -> dict[str, Choice]:
    """Of each method the rate and the settings whose short run is right most often.

    In its last rollouts and on what is watched; a run that had to be stopped is chosen only where all were.
    """
    best: dict[str, tuple[float, Choice]] = {}
    for run in runs:
        trial, reached = run["trial"], score(run)
        if trial["method"] not in best or reached > best[trial["method"]][0]:
            best[trial["method"]] = (reached, Choice(trial["rate"], tuple(trial["more"].items())))
    return {method: choice for method, (_, choice) in best.items()}


def score(run: dict[str, Any]) -> float:
    """What a short run is chosen by: its share of right completions in the last quarter, and what is watched."""
    if "known" in run:
        return float(run["known"]["chosen_by"])
    last = run["rollouts"][-max(1, len(run["rollouts"]) // 4) :]
    if run["stopped"] is not None or not last:
        return -1.0
    right = sum(each["right"] for each in last) / len(last)
    return float(right + (run["curve"][-1][1] if run["curve"] else 0.0))


def tried(runs: Sequence[dict[str, Any]]) -> dict[str, set[float]]:
    """The learning rates of each method."""
    found: dict[str, set[float]] = {}
    for run in runs:
        found.setdefault(run["trial"]["method"], set()).add(run["trial"]["rate"])
    return found


def collapsed(run: dict[str, Any], start: dict[str, Any], exam: str) -> bool:
    """In the end below the start, in the exam where there was one, or below half the peak of the curve."""
    last = run["curve"][-1][1] if run["curve"] else 0.0
    peak = max((value for _, value in run["curve"]), default=0.0)
    ended, began = last, start["watched"]
    if exam in run["exams"]:
        ended, began = run["exams"][exam]["greedy"], start["exams"][exam]["greedy"]
    return run["stopped"] is not None or ended < began or last < peak / 2


def listed(results: dict[str, Any]) -> dict[str, Any]:
    """The results without curves: a line for each run, its answers packed. All tables follow from it."""
    kept = ("preset", "provenance", "start_digest", "job", "parts", "best", "against", "not_yet")
    start = {name: value for name, value in results["start"].items() if name != "exams"}
    start |= _shares(results["start"]["exams"])
    lines = lines_of(results["runs"], results["start"], results["exams"][0])
    return {**{name: results[name] for name in kept}, "start": start, "runs": lines}


def lines_of(runs: Sequence[dict[str, Any]], start: dict[str, Any], exam: str) -> list[dict[str, Any]]:
    """What is kept of every run; whether it has collapsed shows in an exam. Known ones are as they were kept."""
    lines = []
    for run in runs:
        if "known" in run:
            lines.append(run["known"])
            continue
        line = {name: run["trial"][name] for name in (*KEYS, "seed")}
        line |= {"collapsed": collapsed(run, start, exam), "stopped": run["stopped"]}
        line[WATCHED] = run["curve"][-1][1] if run["curve"] else None
        line |= {"watched_right": packed(run[WATCHED])} if run.get(WATCHED) else {}
        line |= {"chosen_by": score(run)} if line["study"] == "rates" else {}
        exams = _shares(run["exams"])
        for exam, found in run["exams"].items():
            exams[exam] |= {RIGHT: packed(found[RIGHT])} if found.get(RIGHT) else {}
        lines.append(line | exams | {"measured": _measured(run)})
    return lines


def _shares(exams: dict[str, Any]) -> dict[str, Any]:
    """Of every exam, without what became of each problem."""
    return {
        exam: {name: value for name, value in found.items() if not name.startswith(RIGHT)}
        for exam, found in exams.items()
    }


def _measured(run: dict[str, Any]) -> dict[str, float]:
    """Beside accuracies: at the end, over all steps, and means over the last rollouts, one in ten or one."""
    found = {name: float(run[name]) for name in OF_A_RUN if name in run}
    if gradients := sorted(log["grad_norm"] for log in run["logged"] if math.isfinite(log["grad_norm"])):
        found["gradient"] = gradients[len(gradients) // 2]
    log = run["logged"][-1] if run["logged"] else {}
    found |= {name: log[f"adpo/{name}"] for name in AT_THE_END if f"adpo/{name}" in log}
    last = run["rollouts"][-max(1, len(run["rollouts"]) // 10) :]
    for name in last[-1] if last else ():
        found[f"last rollouts: {name}"] = sum(float(each[name]) for each in last) / len(last)
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def rows_of(lines: Sequence[dict[str, Any]], exams: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each method and what a study changes, over its seeds."""
    return [dict(zip(KEYS, key, strict=True)) | _row(group, exams) for key, group in grouped(lines, *KEYS).items()]


def _row(lines: list[dict[str, Any]], exams: Sequence[str]) -> dict[str, Any]:
    row = {"seeds": len(lines), "collapsed": sum(line["collapsed"] for line in lines)}
    row[WATCHED] = _with_interval([line[WATCHED] or 0.0 for line in lines])
    if "chosen_by" in lines[0]:
        row["chosen_by"] = _with_interval([line["chosen_by"] for line in lines])
    for exam in exams:
        for measure in (name for name in lines[0].get(exam, ()) if name != RIGHT):
            if all(measure in line.get(exam, ()) for line in lines):
                row[f"{exam}: {measure}"] = _with_interval([line[exam][measure] for line in lines])
    for measure in dict.fromkeys(name for line in lines for name in line["measured"]):
        row[measure] = _with_interval([line["measured"][measure] for line in lines if measure in line["measured"]])
    return row


def _with_interval(values: Sequence[float]) -> list[float]:
    return list(interval(values)) if len(values) > 1 else [values[0], 0.0]
