"""Methods against each other, seed by seed and problem by problem."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from adpo.experiments.reasoning.answers import RIGHT, WATCHED
from adpo.experiments.statistics import Interval, holm, paired, paired_p, verdict

DRAWS = 2000
DOUBT = 0.05
OURS = ("ADPO", "ADPO Plackett-Luce")
OUR_TARGET = "boltzmann"
"""Of ADPO where a study tries others."""


OTHER_START = "collapsed start"
CHANGED = {
    "targets": "another target",
    "divergences": "another divergence",
    "temperatures": "another temperature",
    OTHER_START: "a start that is sure of everything",
    "mean": "means of log-probabilities",
}
"""Studies of one change, and what they ask."""


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
        return verdict(self.low, self.high)


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
    """The same where other things were asked: steps on a rollout, its batches, rewards, or larger rates."""
    asked: dict[str, dict[str, dict[int, Answers]]] = {}
    best = {run["trial"]["method"]: run["trial"]["rate"] for run in runs if run["trial"]["study"] == "seeds"}
    for run in runs:
        trial, found = run["trial"], _answers(run, exam)
        ours = trial["more"].get("target", OUR_TARGET) == OUR_TARGET
        if trial["study"] in ("inner", "control", "noisy", "hackable", "stale", "backtracking") and found and ours:
            asked.setdefault(_asked(trial, best), {}).setdefault(trial["method"], {})[trial["seed"]] = found
    asked |= _at_their_best(runs, exam)
    both = [*asked.items(), *_one_thing_changed(runs, exam)]
    lines = [line for what, reported in both for line in _compared(reported, exam, what, earlier)]
    return [line for line in lines if line["seeds"] > 1]


def _one_thing_changed(
    runs: Sequence[dict[str, Any]], exam: str
) -> Iterator[tuple[str, dict[str, dict[int, Answers]]]]:
    """Ours as it is reported against ours with one thing changed, and where the start was, against the others."""
    own = {run["trial"]["method"]: run["trial"]["more"] for run in runs if run["trial"]["study"] == "seeds"}
    for (study, what), ours in product(CHANGED.items(), OURS):
        found: dict[str, dict[int, Answers]] = {}
        plain: dict[int, Answers] = {}
        for run in runs:
            trial, answers = run["trial"], _answers(run, exam)
            method, more = trial["method"], {"target": OUR_TARGET, **trial["more"]}
            if answers and trial["study"] == "seeds" and method == ours:
                plain[trial["seed"]] = answers
            if answers and trial["study"] == study and (method == ours or study == OTHER_START):
                same = more == {"target": OUR_TARGET, **own.get(method, {})}
                found.setdefault(method if same else method + trial["changes"], {})[trial["seed"]] = answers
        if any(name.startswith(f"{ours},") for name in found):
            yield what, {ours: plain} | found if study != OTHER_START else found


def _at_their_best(runs: Sequence[dict[str, Any]], exam: str) -> dict[str, dict[str, dict[int, Answers]]]:
    """Methods of which several settings were tried over seeds, at that with most watched problems right."""
    further = {(run["trial"]["method"], run["trial"]["seed"]) for run in runs if run["trial"]["study"] == "beyond"}
    tried: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for run in runs:
        trial = run["trial"]
        if trial["study"] in ("stale", "stale settings"):
            what = f"{_asked(trial, {})}, settings chosen for them"
        elif trial["study"] in ("seeds", "beyond") and (trial["method"], trial["seed"]) in further:
            what = "a setting further"
        else:
            continue
        tried.setdefault(what, {}).setdefault(trial["method"], {}).setdefault(trial["changes"], []).append(run)
    found: dict[str, dict[str, dict[int, Answers]]] = {}
    for what, methods in tried.items():
        for method, settings in methods.items():
            best = max(settings.values(), key=lambda mine: _mean_share(mine, WATCHED))
            answers = {run["trial"]["seed"]: _answers(run, exam) for run in best}
            if len(settings) > 1:
                found.setdefault(what, {})[method] = {seed: each for seed, each in answers.items() if each}
    return found


def _mean_share(runs: Sequence[dict[str, Any]], exam: str) -> float:
    answered = [_answers(run, exam) for run in runs]
    return sum(each.share for each in answered if each) / len(runs)


def _answers(run: dict[str, Any], exam: str) -> Answers | None:
    known, found = run.get("known"), run["exams"].get(exam, {})
    right = run.get(WATCHED) if exam == WATCHED else found.get(RIGHT)
    if right:
        return Answers(right.count("1") / len(right), right, known is not None)
    if known is None:
        return None
    share = known[WATCHED] if exam == WATCHED else found.get("greedy")
    return None if share is None else Answers(share, "", True)


def _asked(trial: dict[str, Any], best: Mapping[str, float]) -> str:
    if trial["study"].startswith("stale"):
        return f"rollouts of {trial['more']['steps_per_generation']} batches"
    if trial["study"] == "backtracking":
        return f"steps taken back, {trial['rate'] / best.get(trial['method'], math.nan):.3g} times the rate"
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
