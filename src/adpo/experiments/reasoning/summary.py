"""Means over seeds, methods against each other, problem by problem, and collapses counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from adpo.experiments.reasoning.answers import packed
from adpo.experiments.reasoning.protocol import Choice
from adpo.experiments.statistics import Interval, holm, interval, paired, paired_p

DRAWS = 2000
DOUBT = 0.05
KEYS = ("study", "method", "rate", "inner", "changes")
"""What tells the lines of a table apart."""
OF_A_RUN = ("entropy", "kl_to_start", "forgetting", "seconds_per_step", "tokens_per_step")
WATCHED = "watched"
"""Problems like those of the training, at the last look."""
RIGHT = "right"
"""What became of every problem: 0 or 1 in a run, packed in a line."""
OURS = ("ADPO", "ADPO Plackett-Luce")
OUR_TARGET = "boltzmann"
"""Of ADPO where a study tries others."""


class Answers(NamedTuple):
    """Of one run: the share of right ones, and what became of every problem, where that was kept."""

    share: float
    right: str
    known: bool  # from an earlier job


class Difference(NamedTuple):
    """In accuracy, with a 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


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
    kept = ("preset", "provenance", "start_digest", "job", "best", "against", "not_yet")
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
    last = run["rollouts"][-max(1, len(run["rollouts"]) // 10) :]
    for name in last[-1] if last else ():
        found[f"last rollouts: {name}"] = sum(float(each[name]) for each in last) / len(last)
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def rows_of(lines: Sequence[dict[str, Any]], exams: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each method and what a study changes, over its seeds."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        together.setdefault(tuple(line[name] for name in KEYS), []).append(line)
    return [dict(zip(KEYS, key, strict=True)) | _row(group, exams) for key, group in together.items()]


def _row(lines: list[dict[str, Any]], exams: Sequence[str]) -> dict[str, Any]:
    row = {"seeds": len(lines), "collapsed": sum(line["collapsed"] for line in lines)}
    row[WATCHED] = _with_interval([line[WATCHED] or 0.0 for line in lines])
    if "chosen_by" in lines[0]:
        row["chosen_by"] = _with_interval([line["chosen_by"] for line in lines])
    for exam in exams:
        for measure in (name for name in lines[0].get(exam, ()) if name != RIGHT):
            found = [line[exam][measure] for line in lines if measure in line.get(exam, ())]
            row[f"{exam}: {measure}"] = _with_interval(found)
    for measure in dict.fromkeys(name for line in lines for name in line["measured"]):
        row[measure] = _with_interval([line["measured"][measure] for line in lines if measure in line["measured"]])
    return row


def _with_interval(values: Sequence[float]) -> list[float]:
    return list(interval(values)) if len(values) > 1 else [values[0], 0.0]


def against(
    runs: Sequence[dict[str, Any]], exam: str, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Ours against every other method, in the most likely answers of an exam, or to what was watched.

    ``earlier`` are lines that were made while the single problems of known runs were there.
    """
    reported: dict[str, dict[int, Answers]] = {}
    for run in runs:
        found = _answers(run, exam)
        if run["trial"]["study"] == "seeds" and found:
            reported.setdefault(run["trial"]["method"], {})[run["trial"]["seed"]] = found
    return _compared(reported, exam, "", earlier)


def against_beside(
    runs: Sequence[dict[str, Any]], exam: str, earlier: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The same where other things were asked of them: steps on a rollout, its batches, or what is rewarded."""
    asked: dict[str, dict[str, dict[int, Answers]]] = {}
    for run in runs:
        trial, found = run["trial"], _answers(run, exam)
        ours = trial["more"].get("target", OUR_TARGET) == OUR_TARGET
        if trial["study"] in ("inner", "control", "noisy", "hackable", "stale") and found and ours:
            asked.setdefault(_asked(trial), {}).setdefault(trial["method"], {})[trial["seed"]] = found
    lines = [line for what, reported in asked.items() for line in _compared(reported, exam, what, earlier)]
    return [line for line in lines if line["seeds"] > 1]


def _answers(run: dict[str, Any], exam: str) -> Answers | None:
    known, found = run.get("known"), run["exams"].get(exam, {})
    right = run.get(WATCHED) if exam == WATCHED else found.get(RIGHT)
    if right:
        return Answers(right.count("1") / len(right), right, known is not None)
    if known is None:
        return None
    share = known[WATCHED] if exam == WATCHED else found.get("greedy")
    return None if share is None else Answers(share, "", True)


def _asked(trial: dict[str, Any]) -> str:
    if trial["study"] == "stale":
        return f"rollouts of {trial['more']['steps_per_generation']} batches"
    steps = "1 step" if trial["inner"] == 1 else f"{trial['inner']} steps"
    return f"{steps} a rollout" if trial["study"] == "inner" else f"{trial['reward']} reward"


def _compared(
    reported: dict[str, dict[int, Answers]], exam: str, what: str, earlier: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    pairs = [(ours, other) for ours in OURS if ours in reported for other in reported if other != ours]
    lines: list[dict[str, Any]] = []
    for ours, other in pairs:
        seeds = sorted(reported[ours].keys() & reported[other].keys())  # the same seeds, as far as both have ended
        mine, theirs = ([reported[method][seed] for seed in seeds] for method in (ours, other))
        asked = {"exam": exam, "what": what, "ours": ours, "other": other}
        said = [line for line in earlier if asked.items() <= line.items()]
        if told := _told(mine, theirs, said):
            lines.append(asked | told)
    for ours in OURS:  # a question, and everyone it was asked of: one family
        family = [line for line in lines if line["ours"] == ours]
        for line, adjusted in zip(family, holm([line["p"] for line in family]), strict=True):
            line["p_holm"] = adjusted
            found = Difference(line["mean"], line["low"], line["high"])
            line["verdict"] = found.verdict if adjusted < DOUBT else "level"
    return lines


def _told(
    mine: Sequence[Answers], theirs: Sequence[Answers], said: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Over problems and seeds; without the problems what was said when they were there, or over seeds alone."""
    seeds, both = len(mine), [*mine, *theirs]
    shares = [[each.share for each in method] for method in (mine, theirs)]
    if seeds and all(each.right for each in both) and len({len(each.right) for each in both}) == 1:
        found = difference([each.right for each in mine], [each.right for each in theirs])
        found = wider(found, paired(*shares)) if seeds > 1 else found
        p = paired_p(*shares) if seeds > 1 else 1.0
        return {"seeds": seeds, **found._asdict(), "p": p, "problems": True}
    for line in said:  # of fewer seeds where not every run had kept its problems; with a new run it is out of date
        if line["seeds"] <= seeds and all(each.known for each in both):
            kept = {name: line[name] for name in ("seeds", *Difference._fields, "p")}
            return kept | {"problems": line.get("problems", True)}
    if seeds < 2:
        return None
    over = paired(*shares)
    found = Difference(over.mean, over.low, over.high)
    return {"seeds": seeds, **found._asdict(), "p": paired_p(*shares), "problems": False}


def wider(over_both: Difference, over_seeds: Interval) -> Difference:
    """Problems and seeds drawn anew say too little of few seeds, Student's t over seeds nothing of problems."""
    return Difference(over_both.mean, min(over_both.low, over_seeds.low), max(over_both.high, over_seeds.high))


def difference(ours: Sequence[str], theirs: Sequence[str], draws: int = DRAWS) -> Difference:
    """Of two methods, a string of 0 and 1 for each seed; problems and seeds are drawn anew together.

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
