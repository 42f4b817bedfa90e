"""Population-based training: members train side by side in rounds; the worst take over weights and settings of the
best, a little changed.

A round of a member is a run of the job from the weights that it has. What the optimizer remembers begins anew with
every round.
"""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adpo.system.files import read_json, write_json
from adpo.tuning import trials
from adpo.tuning.spaces import Range
from adpo.tuning.study import Order, described, opened
from adpo.tuning.trials import Job

STATE, BEST = "population.json", "best"
REPLACED = 0.25
"""Share of the members that give up after a round."""
CHANGED, MOVED = 1.25, 0.1
"""Of a value that is taken over: a factor up or down; of an even range, a share of it."""


@dataclass(frozen=True)
class Plan:
    """How many, and how long."""

    members: int
    rounds: int

    def __post_init__(self) -> None:
        if self.members < 2 or self.rounds < 1:
            raise ValueError(
                f"--population {self.members}, --rounds {self.rounds}: expected at least 2 members and a round"
            )


def raised(job: Job, space: dict[str, Range], order: Order, plan: Plan) -> dict[str, Any]:
    """All rounds, those of an earlier call included; the results, as of a study."""
    opened(job, space, order, {"population": plan.members, "rounds": plan.rounds})
    path = order.out / STATE
    known = read_json(path) if path.exists() else {"runs": []}
    runs: list[dict[str, Any]] = known["runs"]
    members = _first(job, space, plan)
    for number in range(plan.rounds):
        ended = [run for run in runs if run["round"] == number]
        for place in range(len(ended), plan.members):
            runs.append(_ran(job, order, number, place, members[place]))
            write_json(path, {"runs": runs})
        ended = [run for run in runs if run["round"] == number]
        members = _next(ended, space, random.Random(1000 * job.seed + number + 1))
        _tidy(order.out, number, ended)
    return _results(job, space, runs)


def _first(job: Job, space: dict[str, Range], plan: Plan) -> list[dict[str, Any]]:
    """Values spread evenly over each range, in another order for each."""
    draw = random.Random(1000 * job.seed)
    columns = {}
    for name, bounds in space.items():
        shares = [(place + draw.random()) / plan.members for place in range(plan.members)]
        draw.shuffle(shares)
        columns[name] = [_at(bounds, share) for share in shares]
    return [
        {"values": {name: column[place] for name, column in columns.items()}, "start": None}
        for place in range(plan.members)
    ]


def _at(bounds: Range, share: float) -> float:
    low, high = (math.log(bounds.low), math.log(bounds.high)) if bounds.log else (bounds.low, bounds.high)
    value = low + share * (high - low)
    return float(f"{math.exp(value) if bounds.log else value:.3g}")


def _ran(job: Job, order: Order, number: int, place: int, member: dict[str, Any]) -> dict[str, Any]:
    folder = order.out / f"round-{number}" / f"member-{place:02d}"
    words = () if member["start"] is None else ("--start", str(order.out / member["start"] / BEST))
    of_round = Job(job.name, (*job.words, *words), job.seed)
    found = of_round.carried_out(folder, member["values"], lambda *_: False)
    told = ", ".join(f"{name} {value:g}" for name, value in member["values"].items())
    order.say(f"round {number}, member {place}: {told}: {found}")
    return {
        "round": number,
        "member": place,
        **member,
        "score": found.score,
        "folder": str(folder.relative_to(order.out)),
    }


def _next(ended: list[dict[str, Any]], space: dict[str, Range], draw: random.Random) -> list[dict[str, Any]]:
    """Everyone goes on from what it has; the worst from what one of the best has."""
    order = sorted(ended, key=_score)
    few = max(1, round(REPLACED * len(order)))
    if order[-1]["score"] is None:
        raise ValueError("every member of the population failed: look at the log.txt files of the round")
    best = [run for run in order[-few:] if run["score"] is not None]
    gone = {run["member"] for run in order[:few]} | {run["member"] for run in ended if run["score"] is None}
    members = []
    for run in sorted(ended, key=lambda run: int(run["member"])):
        if run["member"] not in gone:
            members.append({"values": run["values"], "start": run["folder"]})
            continue
        source = draw.choice(best)
        values = {name: _changed(source["values"][name], bounds, draw) for name, bounds in space.items()}
        members.append({"values": values, "start": source["folder"]})
    return members


def _score(run: dict[str, Any]) -> float:
    """What failed comes last, also behind rewards below 0."""
    return -math.inf if run["score"] is None else float(run["score"])


def _changed(value: float, bounds: Range, draw: random.Random) -> float:
    up = draw.random() < 0.5
    if bounds.log:
        value = value * CHANGED if up else value / CHANGED
    else:
        step = MOVED * (bounds.high - bounds.low)
        value = value + step if up else value - step
    return float(f"{min(max(value, bounds.low), bounds.high):.3g}")


def _tidy(out: Path, number: int, ended: list[dict[str, Any]]) -> None:
    """Weights of the round before are no longer needed."""
    for run in ended:
        for checkpoint in (out / run["folder"]).glob("checkpoint-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)
    for folder in out.glob(f"round-{number - 1}/member-*"):
        trials.tidied(folder, kept=False)


def _results(job: Job, space: dict[str, Range], runs: list[dict[str, Any]]) -> dict[str, Any]:
    last = max(run["round"] for run in runs)
    winner = max((run for run in runs if run["round"] == last), key=_score)
    line, run = [winner], winner
    while run["start"] is not None:
        run = next(each for each in runs if each["folder"] == run["start"])
        line.insert(0, run)
    return {
        **described(job, space),
        "trials": [
            {"values": run["values"], "score": run["score"], "state": "complete", "round": run["round"]}
            for run in runs
            if run["score"] is not None
        ],
        "importance": {},
        "lineage": [{"round": run["round"], "values": run["values"], "score": run["score"]} for run in line],
        "model": str(Path(winner["folder"]) / BEST),
    }
