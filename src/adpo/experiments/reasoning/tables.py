"""The results as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adpo.experiments.tables import Lines

LATE = ("reward", "right", "length", "distinct", "agreed_wrong", "live")
MORE = (
    *("entropy", "kl_to_start", "forgetting", "gradient", "tokens_per_step", "seconds_per_step"),
    *("steps_undone", "rate_factor"),
)
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
    columns = (
        *("method", "rate", steps, "seeds", "collapsed", "watched: greedy"),
        *(f"{exam}: greedy" for exam in (*exams, *parts)),
        *(f"{exam}: {k.replace('_at_', '@')}" for exam in exams),
        *("reward", "right", "length", "distinct answers", "agreed, wrong", "live", "nats a token", "KL to start"),
        *("forgetting", "gradient", "tokens a step", "s a step", "steps taken back", "rate in the end, times"),
        *(("chosen by",) if study == "rates" else ()),
    )
    rows = []
    for row in results["rows"]:
        if row["study"] != study:
            continue
        late = [f"last rollouts: {name}" for name in LATE]
        rows.append(
            (
                f"{row['method']}{row['changes']}",
                f"{row['rate']:g}",
                str(row["inner"]),
                str(row["seeds"]),
                str(row["collapsed"]),
                _share(row["watched"]),
                *(_share(row.get(f"{exam}: greedy")) for exam in (*exams, *parts)),
                *(_share(row.get(f"{exam}: {k}")) for exam in exams),
                *(f"{row[name][0]:.3g}" if name in row else "" for name in (*late, *MORE)),
                *((f"{row['chosen_by'][0]:.3f}",) if study == "rates" else ()),
            )
        )
    before = [_begun(results, exams, parts, k, len(columns))] if study == "seeds" and rows else []
    return Lines(title, columns, before + rows)


def _begun(
    results: dict[str, Any], exams: Sequence[str], parts: Sequence[str], k: str, columns: int
) -> tuple[str, ...]:
    """What everyone started with."""
    start = results["start"]
    known = [f"{start['watched']:.1%}", *(f"{start['exams'][exam]['greedy']:.1%}" for exam in exams)]
    known += [f"{start['exams'][part]['greedy']:.1%}" if part in start["exams"] else "" for part in parts]
    known += [f"{start['exams'][exam][k]:.1%}" for exam in exams]
    return ("the start", "", "", "", "", *known, *("" for _ in range(columns - 5 - len(known))))


def _share(value: Sequence[float] | None) -> str:
    if value is None:
        return ""
    return f"{value[0]:.1%}" + (f" ± {value[1]:.1%}" if value[1] else "")


def _against(results: dict[str, Any]) -> Lines:
    rows = [
        (
            row["exam"],
            row["what"],
            row["ours"],
            row["other"],
            str(row["seeds"]),
            f"{row['mean']:+.1%} [{row['low']:+.1%}, {row['high']:+.1%}]",
            f"{row['p_holm']:.2g}",
            row["verdict"] + ("" if row.get("problems", True) else ", over seeds alone"),
        )
        for row in results["against"]
    ]
    return Lines(
        "greedy accuracy against, 95 % over problems and seeds",
        ("problems", "asked", "method", "against", "seeds", "difference", "p", ""),
        rows,
    )
