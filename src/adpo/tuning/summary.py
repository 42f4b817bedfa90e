"""Which settings follow from a study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from adpo.experiments.tables import Lines
from adpo.tuning import confirmation
from adpo.tuning.trials import shown, unit

BEST_SHARE = 0.25


def best_of(results: dict[str, Any]) -> dict[str, Any]:
    """The trial with the highest score; of a population, of its last round."""
    if "lineage" in results:
        last: dict[str, Any] = results["lineage"][-1]
        return last
    ended = [trial for trial in results["trials"] if trial["state"] == "complete"]
    if not ended:
        raise ValueError("no trial has ended: there is nothing to recommend")
    best: dict[str, Any] = max(ended, key=lambda trial: trial["score"])
    return best


def recommended(results: dict[str, Any]) -> Lines:
    """Every setting: at the best trial, and where the best quarter of the trials lies."""
    best, measure = best_of(results), results["measure"]
    ended = [trial for trial in results["trials"] if trial["score"] is not None]
    ended.sort(key=lambda trial: -trial["score"])
    top = ended[: max(1, round(BEST_SHARE * len(ended)))]
    rows = []
    for name, bounds in results["space"].items():
        among = sorted(trial["values"][name] for trial in top)
        share = results["importance"].get(name)
        rows.append(
            [
                name,
                f"{best['values'][name]:g}",
                f"{among[0]:g} to {among[-1]:g}",
                f"{bounds['low']:g} to {bounds['high']:g}",
                "" if share is None else f"{share:.0%}",
            ]
        )
    title = f"{results['job']}: {len(results['trials'])} trials, the best {shown(best['score'], measure)}"
    return Lines(title, ["setting", "best", f"of the best {len(top)}", "tried", "importance"], rows)


def lineage(results: dict[str, Any]) -> Lines:
    """Of a population: the settings by which the winner came about, round by round."""
    names, measure = list(results["space"]), results["measure"]
    rows = [
        [str(run["round"]), *(f"{run['values'][name]:g}" for name in names), shown(run["score"], measure)]
        for run in results["lineage"]
    ]
    return Lines("how the winner was raised", ["round", *names, measure], rows)


def every(results: dict[str, Any]) -> Lines:
    """All trials, the best first."""
    names, measure = list(results["space"]), results["measure"]
    order = sorted(results["trials"], key=lambda trial: (trial["score"] is None, -(trial["score"] or 0.0)))
    rows = [
        [
            *(f"{trial['values'][name]:g}" for name in names),
            "" if trial["score"] is None else shown(trial["score"], measure),
            "" if trial["state"] == "complete" else "given up",
        ]
        for trial in order
    ]
    return Lines("all trials", [*names, measure, ""], rows)


def config(results: dict[str, Any], asked: Mapping[str, Any]) -> str:
    """What to use as a file for ``--config``: what was chosen, and what was asked for."""
    measure: str = results["measure"]
    found = confirmation.winner(results["confirmed"]) if "confirmed" in results else None
    if found is not None:
        values = found["values"]
        reached = f"{confirmation.mean(found['scores'], measure)} {unit(measure)[1]}".strip() + " over other seeds"
    else:
        best = best_of(results)
        values, reached = best["values"], shown(best["score"], measure)
    head = f"# adpo tune {results['job']}: best of {len(results['trials'])} trials, {reached}\n"
    chosen = "".join(f"{name}: {value:g}\n" for name, value in values.items())
    rest = {name: value for name, value in asked.items() if name not in values}
    return head + chosen + (yaml.safe_dump(rest, sort_keys=False) if rest else "")
