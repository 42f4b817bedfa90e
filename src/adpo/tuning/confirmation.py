"""Whether what a study found holds with other seeds: the best few of its settings against the job as it is."""

from __future__ import annotations

from typing import Any

from adpo.experiments.statistics import holm, interval, paired, paired_p
from adpo.experiments.tables import Lines
from adpo.files import read_json, write_json
from adpo.tuning.study import Order
from adpo.tuning.trials import Tried

STATE = "confirmed.json"
FINALISTS = 3
LEVEL = 0.05
AS_IT_IS = "as it is"


def confirmed(job: Tried, results: dict[str, Any], order: Order, seeds: int) -> list[dict[str, Any]]:
    """The job as it is and the finalists, each with seeds that the study has not seen; kept as they end."""
    path = order.out / STATE
    known: dict[str, float | None] = read_json(path) if path.exists() else {}
    found = []
    for label, values in [(AS_IT_IS, {}), *finalists(results)]:
        scores = []
        for seed in range(job.seed + 1, job.seed + 1 + seeds):
            name = f"{label.replace(' ', '-')}-seed{seed}"
            key = f"{name}: {told(values)}"
            if key not in known:
                outcome = job.with_seed(seed).carried_out(order.out / "confirmed" / name, values, lambda *_: False)
                order.say(f"{key}: {outcome}")
                known[key] = outcome.score
                write_json(path, known)
            scores.append(known[key])
        found.append({"label": label, "values": values, "scores": scores})
    return found


def finalists(results: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """The best trials that ended."""
    ended = [trial for trial in results["trials"] if trial["state"] == "complete"]
    ended.sort(key=lambda trial: -trial["score"])
    return [(f"trial {place}", trial["values"]) for place, trial in enumerate(ended[:FINALISTS], 1)]


def told(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items()) or AS_IT_IS


def winner(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest mean, of those whose runs all ended."""
    whole = [each for each in found if None not in each["scores"]]
    if not whole:
        raise ValueError("no settings ended with every seed: there is nothing to recommend")
    return max(whole, key=lambda each: sum(each["scores"]))


def beyond_doubt(found: list[dict[str, Any]], one: dict[str, Any]) -> bool:
    """Better than the job as it is at 5 %: paired t-tests, Holm corrected, as there are several finalists."""
    usual, *others = found
    whole = [each for each in others if None not in each["scores"]]
    if one is usual or None in usual["scores"] or len(usual["scores"]) < 2:
        return False
    p_values = holm([paired_p(each["scores"], usual["scores"]) for each in whole])
    place = next(number for number, each in enumerate(whole) if each is one)
    return p_values[place] < LEVEL and paired(one["scores"], usual["scores"]).mean > 0


def verdict(found: list[dict[str, Any]]) -> str:
    """Whether to change what the job does by itself."""
    best, usual = winner(found), found[0]
    if best is usual:
        return "as it is"
    return told(best["values"]) if beyond_doubt(found, best) else f"as it is; {told(best['values'])} is level"


def table(results: dict[str, Any]) -> Lines:
    found = results["confirmed"]
    usual = found[0]["scores"]
    rows = []
    for each in found:
        failed = each["scores"].count(None)
        row = [told(each["values"]), f"{failed} failed" if failed else mean(each["scores"])]
        compared = each is not found[0] and not failed and None not in usual
        rows.append([*row, difference(each["scores"], usual) if compared else ""])
    title = f"{results['job']}: {len(usual)} other seeds; to use: {verdict(found)}"
    return Lines(title, ["settings", f"{results['measure']}, %", "against the job as it is"], rows)


def mean(scores: list[float]) -> str:
    found = interval(scores)
    return f"{100 * found.mean:.1f} ± {100 * found.half:.1f}" if len(scores) > 1 else f"{100 * found.mean:.1f}"


def difference(ours: list[float], theirs: list[float]) -> str:
    found = paired(ours, theirs)
    span = f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]" if len(ours) > 1 else ""
    return f"{100 * found.mean:+.1f}{span}"
