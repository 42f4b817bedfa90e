"""``adpo reproduce defaults``: studies of the package's jobs, and the settings that follow from them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from adpo.experiments.tables import Lines, markdown
from adpo.system.files import write_json, write_text
from adpo.tuning import confirmation, summary
from adpo.tuning import tuner as command
from adpo.tuning.study import ORDER, RESULTS, Order


class Study(NamedTuple):
    """What is typed after `adpo tune`."""

    name: str
    job: str
    words: str
    trials: int
    confirm: int


SHORT = "--max_steps 100 --eval_every 25 --dev_problems 300 --eval_problems 100"
FEW = "--iterations 20 --worlds 2 --scenario gaussian-mild"
PRESETS = {
    "smoke": (
        Study("bandits", "bandits", FEW, 3, 2),
        Study("distill", "distill", "--states 1500 --steps 60 --students 2 --episodes 1", 3, 2),
    ),
    "cpu": (
        Study("train", "train", SHORT, 16, 4),
        Study("train-hybrid", "train", f"{SHORT} --tau_schedule hybrid", 12, 4),
        Study("prefer", "prefer", "--max_steps 100 --eval_every 25", 8, 4),
        Study("bandits", "bandits", "--method adpo-kde", 24, 4),
        Study("distill", "distill", "--steps 300", 16, 4),
    ),
}


def reproduce(preset: str, out: Path, resume: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Every study of the preset, those of an earlier call included."""
    known = [study.name for study in PRESETS[preset] if (out / study.name).exists()]
    if known and not resume:
        raise ValueError(f"there are studies in {out}: --resume goes on with them")
    for study in PRESETS[preset]:
        command.needed(study.job)
    order = Order(out, 0, say=say)
    found: dict[str, Any] = {
        "experiment": "defaults",
        "preset": preset,
        "studies": {},
        "not_yet": len(PRESETS[preset]),
    }
    for study in PRESETS[preset]:
        say(f"{study.name}: {typed(study)}")
        place = replace(
            order, out=out / study.name, trials=study.trials, resume=(out / study.name / ORDER).exists()
        )
        words = shlex.split(study.words)
        studied = command.studied(study.job, words, [], 0, place, confirm=study.confirm)
        found["studies"][study.name] = {"typed": typed(study), **studied}
        found["not_yet"] -= 1
        write_json(out / RESULTS, found)
        write_text(out / "tables.md", markdown(tables(found)))
    return found


def typed(study: Study) -> str:
    return f"adpo tune {study.job} {study.words} --trials {study.trials} --confirm {study.confirm}".replace(
        "  ", " "
    )


def tables(found: dict[str, Any]) -> list[Lines]:
    """Settings to begin with, and for each study what it says of its settings and of other seeds."""
    every = [
        each
        for study in found["studies"].values()
        for each in (confirmation.table(study), summary.recommended(study))
    ]
    return [to_begin_with(found), *every]


def to_begin_with(found: dict[str, Any]) -> Lines:
    """One line a study: what to use, what it reaches with other seeds, and whether that is beyond doubt."""
    rows = []
    for study in found["studies"].values():
        confirmed = study["confirmed"]
        usual, best = confirmed[0], confirmation.winner(confirmed)
        failed = None in usual["scores"]
        row = [f"`{study['typed']}`", study["measure"], "failed" if failed else confirmation.mean(usual["scores"])]
        if best is None or best is usual:
            rows.append([*row, "all failed" if best is None else confirmation.AS_IT_IS, "", "", ""])
            continue
        difference = "" if failed else confirmation.difference(best["scores"], usual["scores"])
        sure = "yes" if confirmation.beyond_doubt(confirmed, best) else "no"
        rows.append([*row, confirmation.told(best["values"]), confirmation.mean(best["scores"]), difference, sure])
    columns = ["study", "measure, %", "as it is", "best settings", "with them", "difference", "beyond doubt"]
    return Lines("settings to begin with", columns, rows)
