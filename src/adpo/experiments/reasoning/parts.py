"""Exam problems whose mirror image was not trained on: 47+69 says much of 69+47."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from adpo.experiments.reasoning.answers import RIGHT, packed
from adpo.experiments.reasoning.problems import Sets

Places = dict[str, list[int]]
"""By the name of a part: its problems, counted from 0, among those of its exam."""
_SWAPPED = re.compile(r"(\d+)([+*])(\d+)=")


def of(sets: Sets) -> Places:
    """Of exams in arithmetic the part without such problems, where there are any."""
    trained = {row["prompt"] for row in sets.train if isinstance(row["prompt"], str)}
    found = {}
    for exam, rows in sets.exams.items():
        apart = [place for place, row in enumerate(rows) if mirrored(row["prompt"]) not in trained]
        if 0 < len(apart) < len(rows):
            found[_named(exam)] = apart
    return found


def mirrored(prompt: Any) -> str | None:
    """The same in the other order; none where that is another problem.

    >>> mirrored("47+69="), mirrored("47-69=")
    ('69+47=', None)
    """
    found = _SWAPPED.fullmatch(prompt) if isinstance(prompt, str) else None
    return f"{found[3]}{found[2]}{found[1]}=" if found else None


def add(runs: Sequence[dict[str, Any]], start: dict[str, Any], parts: Mapping[str, Sequence[int]]) -> None:
    """The parts as exams of their own: to the start, and to every run that has kept its answers."""
    for name, places in parts.items():
        for run in (*runs, start):
            if right := run["exams"].get(_exam(name), {}).get(RIGHT):
                mine = "".join(right[place] for place in places)
                run["exams"][name] = {"greedy": mine.count("1") / len(mine), RIGHT: mine}
                if "known" in run:
                    run["known"] = {**run["known"], name: {**run["exams"][name], RIGHT: packed(mine)}}


def kept(runs: Sequence[dict[str, Any]], part: str) -> bool:
    """Whether methods can be compared in a part: all reported runs have kept their answers."""
    return all(part in run["exams"] for run in runs if run["trial"]["study"] == "seeds")


def _named(exam: str) -> str:
    return f"{exam}, unmirrored"


def _exam(name: str) -> str:
    return name.removesuffix(", unmirrored")
