"""Parts of exams without mirror images of what was trained on, or of each other: 47+69 says much of 69+47."""

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
    """Of arithmetic: where some were trained on in the other order, the others; else the first of a pair."""
    trained = {row["prompt"] for row in sets.train if isinstance(row["prompt"], str)}
    found = {}
    for exam, rows in sets.exams.items():
        prompts = [row["prompt"] for row in rows]
        apart = [place for place, prompt in enumerate(prompts) if mirrored(prompt) not in trained]
        if 0 < len(apart) < len(prompts):
            found[f"{exam}, unmirrored"] = apart
        elif apart and len(firsts := _firsts(prompts)) < len(prompts):
            found[f"{exam}, each pair once"] = firsts
    return found


def _firsts(prompts: Sequence[Any]) -> list[int]:
    """Of two that are each other's mirror image the first, and all that are alone."""
    turned = [mirrored(prompt) for prompt in prompts]
    places = {prompt: place for place, prompt in enumerate(prompts) if isinstance(prompt, str)}
    return [place for place, prompt in enumerate(turned) if places.get(str(prompt), place) >= place]


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


def _exam(part: str) -> str:
    return part.rsplit(", ", 1)[0]
