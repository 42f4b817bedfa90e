"""Whether what a study found holds with other seeds: the best few of its settings against the job as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from adpo.experiments.statistics import holm, interval, paired, paired_p
from adpo.experiments.tables import Lines
from adpo.system.files import read_json, write_json
from adpo.tuning.study import Order
from adpo.tuning.trials import Tried, tidied, unit, with_unit

STATE = "confirmed.json"
FINALISTS, LEVEL, LEAST = 3, 0.05, 3
"""How many are held against the job as it is; when a lead is beyond doubt, and of how many seeds one can tell."""
AS_IT_IS = "as it is"
Held = dict[str, Any]
"""Settings, and what they reached with each seed: nothing where a run failed."""


def confirmed(job: Tried, results: dict[str, Any], order: Order, seeds: int) -> list[Held]:
    """The job as it is and the finalists, each with seeds that the study has not seen; kept as they end.

    A run that failed is tried again by whoever goes on.
    """
    path = order.out / STATE
    scores: dict[str, float] = read_json(path)["scores"] if path.exists() else {}
    found = []
    for values in ({}, *finalists(results)):
        reached = []
        for seed in range(job.seed + 1, job.seed + 1 + seeds):
            key = f"{told(values)}, seed {seed}"
            if key not in scores:
                folder = order.out / "confirmed" / _named(key)
                outcome = job.with_seed(seed).carried_out(folder, values, lambda *_: False)
                tidied(folder, kept=False)
                order.say(f"{key}: {outcome}")
                if outcome.score is not None:
                    scores[key] = outcome.score
                write_json(path, {"seeds": seeds, "scores": scores})
            reached.append(scores.get(key))
        found.append({"values": values, "scores": reached})
    return found


def seeds_of(out: Path) -> int:
    """Of an earlier confirmation in this folder."""
    return int(read_json(out / STATE)["seeds"]) if (out / STATE).exists() else 0


def _named(key: str) -> str:
    """A folder of its own for settings and seed, whatever place they take."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def finalists(results: dict[str, Any]) -> list[dict[str, float]]:
    """Settings of the best trials that ended."""
    ended = [trial for trial in results["trials"] if trial["state"] == "complete"]
    return [trial["values"] for trial in sorted(ended, key=lambda trial: -float(trial["score"]))[:FINALISTS]]


def told(values: dict[str, float]) -> str:
    """The same words whichever way the settings are ordered: what was run before is known by them."""
    return ", ".join(f"{name} {value:g}" for name, value in sorted(values.items())) or AS_IT_IS


def winner(found: list[Held]) -> Held | None:
    """The highest mean, of those whose runs all ended."""
    whole = [each for each in found if None not in each["scores"]]
    return max(whole, key=lambda each: float(sum(each["scores"])), default=None)


def beyond_doubt(found: list[Held], one: Held) -> bool:
    """Better than the job as it is at 5 %: paired t-tests, Holm corrected, as there are several finalists."""
    usual, *others = found
    if one is usual or len(usual["scores"]) < LEAST:
        return False
    p_values = holm([_p(each["scores"], usual["scores"]) for each in others])
    place = next(number for number, each in enumerate(others) if each is one)
    return p_values[place] < LEVEL and paired(one["scores"], usual["scores"]).mean > 0


def _p(ours: list[Any], theirs: list[Any]) -> float:
    """Nothing is known where a run failed, or where all differences are the same."""
    if None in ours or None in theirs:
        return 1.0
    if len({round(a - b, 9) for a, b in zip(ours, theirs, strict=True)}) < 2:
        return 1.0
    return paired_p(ours, theirs)


def verdict(found: list[Held]) -> str:
    """Which settings are to be used, and whether they are known to be better than the job as it is."""
    best, usual = winner(found), found[0]
    if best is None:
        return "every setting failed with some seed"
    if best is usual:
        return AS_IT_IS
    return f"{told(best['values'])}, {'better' if beyond_doubt(found, best) else 'not better'} beyond doubt"


def table(results: dict[str, Any]) -> Lines:
    found = results["confirmed"]
    usual, measure = found[0]["scores"], results["measure"]
    rows = []
    for each in found:
        failed = each["scores"].count(None)
        row = [told(each["values"]), f"{failed} failed" if failed else mean(each["scores"], measure)]
        compared = each is not found[0] and not failed and None not in usual
        rows.append([*row, difference(each["scores"], usual, measure) if compared else ""])
    title = f"{results['job']}: {len(usual)} other seeds; highest: {verdict(found)}"
    return Lines(title, ["settings", with_unit(measure), "against the job as it is"], rows)


def mean(scores: list[float], measure: str = "") -> str:
    found, (scale, percent) = interval(scores), unit(measure)
    form = ".1f" if percent else ".4g"
    middle = format(scale * found.mean, form)
    return f"{middle} ± {format(scale * found.half, form)}" if len(scores) > 1 else middle


def difference(ours: list[float], theirs: list[float], measure: str = "") -> str:
    found, (scale, percent) = paired(ours, theirs), unit(measure)
    form = "+.1f" if percent else "+.4g"
    ends = (format(scale * value, form) for value in (found.low, found.high))
    span = f" [{', '.join(ends)}]" if len(ours) > 1 else ""
    return f"{format(scale * found.mean, form)}{span}"
