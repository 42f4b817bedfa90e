"""The results as tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from adpo.experiments.rows import Row, where
from adpo.experiments.tables import Columns, Lines, table

MEASURED = {
    "reward": "last rollouts: reward",
    "right": "last rollouts: right",
    "length": "last rollouts: length",
    "distinct answers": "last rollouts: distinct",
    "agreed, wrong": "last rollouts: agreed_wrong",
    "live": "last rollouts: live",
    "nats a token": "entropy",
    "KL to start": "kl_to_start",
    "forgetting": "forgetting",
    "gradient": "gradient",
    "tokens a step": "tokens_per_step",
    "s a step": "seconds_per_step",
    "steps taken back": "steps_undone",
    "rate in the end, times": "rate_factor",
}
"""Columns of means, and the measures that stand in them."""
STUDIES = {
    "seeds": "each method at its own best learning rate",
    "rates": "learning rates: short runs, one seed",
    "inner": "other numbers of optimizer steps on a rollout",
    "range": "larger learning rates",
    "control": "rewards that say nothing",
    "mean": "means of log-probabilities instead of sums",
    "targets": "targets",
    "divergences": "divergences",
    "temperatures": "temperatures",
    "beyond": "a setting beyond the first or the last that there was to choose from",
    "collapsed start": "a start that is sure of everything",
    "noisy": "a reward that is wrong one time in five",
    "hackable": "a reward that pays wrong answers for their length",
    "backtracking": "steps taken back, at each method's best learning rate and at larger ones",
    "stale": "several batches sampled at once, by an older policy; reward to live are those of the last sampling",
    "stale settings": "several batches sampled at once, with settings that were not chosen",
}


def tables(results: dict[str, Any]) -> list[Lines]:
    made = [_study(results, study, title) for study, title in STUDIES.items()]
    return [*(lines for lines in made if lines.rows), *([_against(results)] if results["against"] else [])]


def _study(results: dict[str, Any], study: str, title: str) -> Lines:
    exams, parts = results["exams"], results.get("parts", ())
    k = next(key for key in results["start"]["exams"][exams[0]] if key.startswith("pass_at_"))
    steps = "steps a batch" if study.startswith("stale") else "steps a rollout"  # of which one may have several
    of_exams = [(f"{exam}: greedy", f"{exam}: greedy") for exam in (*exams, *parts)]
    of_exams += [(f"{exam}: {k.replace('_at_', '@')}", f"{exam}: {k}") for exam in exams]
    columns: Columns = [
        ("method", "{method}{changes}"),
        ("rate", "{rate:g}"),
        (steps, "{inner}"),
        ("seeds", "{seeds}"),
        ("collapsed", "{collapsed}"),
        ("watched: greedy", partial(_share, name="watched")),
        *((heading, partial(_share, name=name)) for heading, name in of_exams),
        *((heading, partial(_mean, name=name)) for heading, name in MEASURED.items()),
        *([("chosen by", "{chosen_by[0]:.3f}")] if study == "rates" else []),
    ]
    found = table(title, columns, where(results["rows"], study=study))
    if study != "seeds" or not found.rows:
        return found
    return found._replace(rows=[_begun(results, exams, parts, k, len(columns)), *found.rows])


def _begun(
    results: dict[str, Any], exams: Sequence[str], parts: Sequence[str], k: str, columns: int
) -> tuple[str, ...]:
    """What everyone started with."""
    start = results["start"]
    known = [f"{start['watched']:.1%}", *(f"{start['exams'][exam]['greedy']:.1%}" for exam in exams)]
    known += [f"{start['exams'][part]['greedy']:.1%}" if part in start["exams"] else "" for part in parts]
    known += [f"{start['exams'][exam][k]:.1%}" for exam in exams]
    return ("the start", "", "", "", "", *known, *("" for _ in range(columns - 5 - len(known))))


def _share(row: Row, name: str) -> str:
    if name not in row:
        return ""
    mean, half = row[name]
    return f"{mean:.1%}" + (f" ± {half:.1%}" if half else "")


def _mean(row: Row, name: str) -> str:
    return f"{row[name][0]:.3g}" if name in row else ""


def _against(results: dict[str, Any]) -> Lines:
    columns: Columns = [
        ("problems", "{exam}"),
        ("asked", "{what}"),
        ("method", "{ours}"),
        ("against", "{other}"),
        ("seeds", "{seeds}"),
        ("difference", "{mean:+.1%} [{low:+.1%}, {high:+.1%}]"),
        ("p", "{p_holm:.2g}"),
        ("", lambda row: row["verdict"] + ("" if row.get("problems", True) else ", over seeds alone")),
    ]
    return table("greedy accuracy against, 95 % over problems and seeds", columns, results["against"])
