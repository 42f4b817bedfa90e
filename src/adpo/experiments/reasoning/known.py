"""Runs of an earlier job, from the lines that it has kept: not carried out again, and part of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adpo.experiments.reasoning.answers import unpacked
from adpo.experiments.reasoning.protocol import Trial, named
from adpo.system.files import read_json

NAMED = ("study", "method", "rate", "seed", "inner", "changes")
"""What the name of a trial follows from."""
Fields = dict[str, Any]
"""Names, and the type or types of what they stand for."""
NUMBER, TEXT_OR_NONE = (int, float), (str, type(None))
LISTED: Fields = {"preset": str, "start_digest": str, "provenance": list, "runs": list, "against": list}
LINE: Fields = {
    **{"study": str, "method": str, "rate": NUMBER, "seed": int, "inner": int, "changes": str},
    **{"collapsed": bool, "stopped": TEXT_OR_NONE, "watched": (*NUMBER, type(None)), "measured": dict},
}
SAID: Fields = {"exam": str, "what": str, "ours": str, "other": str, "seeds": int}
SAID |= {"mean": NUMBER, "low": NUMBER, "high": NUMBER, "p": NUMBER}


@dataclass(frozen=True)
class Known:
    """Lines by the names of their trials, what was said of them together, and the code that made them."""

    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    against: Sequence[dict[str, Any]] = ()
    provenance: Sequence[dict[str, str]] = ()

    def run(self, trial: Trial) -> dict[str, Any]:
        """As a trial that was carried out tells it, as far as that was kept."""
        line = self.lines[trial.name]
        return {
            "trial": trial.told(),
            "known": line,
            "stopped": line["stopped"],
            "curve": [],
            "watched": unpacked(line["watched_right"]) if "watched_right" in line else "",
            "rollouts": [],
            "logged": [],
            "exams": {exam: _exam(kept) for exam, kept in line.items() if _is_exam(exam, kept)},
        }


def read(path: Path) -> list[dict[str, Any]]:
    """What `adpo reproduce reasoning` has listed, once or several times, checked."""
    found = read_json(path, "--known expects a runs.json of adpo reproduce reasoning")
    entries = found if isinstance(found, list) else [found]
    try:
        for entry in entries:
            _checked(entry)
    except ValueError as error:
        expected = "expected a runs.json of adpo reproduce reasoning, or a list of them"
        raise ValueError(f"--known {path}: {expected}; {error}") from None
    return entries


def taken(entries: Sequence[dict[str, Any]], path: Path, preset: str, start: str, job: str) -> Known:
    """The entry of this preset and this start: results of two starts are never merged.

    Nor those of other problems or sizes, as far as the entry tells: ``job`` is their fingerprint.
    """
    fitting = [entry for entry in entries if (entry["preset"], entry["start_digest"]) == (preset, start)]
    if len(fitting) != 1:
        there = ", ".join(f"{entry['preset']} from {entry['start_digest']}" for entry in entries) or "none"
        raise ValueError(f"--known {path}: expected runs of {preset} from the start {start} once; got {there}")
    entry = fitting[0]
    if entry.get("job", job) != job:
        raise ValueError(f"--known {path}: its runs of {preset} are of other problems (--data) or other sizes")
    lines = {_name(line): line for line in entry["runs"]}
    return Known(lines, entry["against"], entry["provenance"])


def _name(line: dict[str, Any]) -> str:
    return named(*(line[key] for key in NAMED))


def _is_exam(name: str, kept: Any) -> bool:
    return isinstance(kept, dict) and name != "measured"


def _exam(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: unpacked(value) if name == "right" else value for name, value in kept.items()}


def _checked(entry: Any) -> None:
    _fits(entry, LISTED, "it")
    names = set()
    for line in entry["runs"]:
        _fits(line, LINE, "a run")
        name = _name(line)
        if name in names:
            raise ValueError(f"{name!r} is there twice")
        names.add(name)
        _fits(line, {"chosen_by": NUMBER} if line["study"] == "rates" else {}, repr(name))
        _fits(line["measured"], dict.fromkeys(line["measured"], NUMBER), f"measured of {name!r}")
        _answers(line, "watched_right", repr(name))
        for exam, kept in line.items():
            if _is_exam(exam, kept):
                shares = (share for share in kept if share != "right")
                _fits(kept, dict.fromkeys(("greedy", *shares), NUMBER), f"{exam} of {name!r}")
                _answers(kept, "right", f"{exam} of {name!r}")
    for said in entry["against"]:
        _fits(said, SAID, "a comparison")
    for made in entry["provenance"]:
        _fits(made, {}, "provenance")


def _answers(kept: dict[str, Any], key: str, what: str) -> None:
    if key in kept:
        _fits(kept, {key: str}, what)
        unpacked(kept[key])


def _fits(found: Any, wanted: Fields, what: str) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{what} is {str(found)[:40]!r}")
    for key, kind in wanted.items():
        if key not in found:
            raise ValueError(f"{what} has no {key}")
        if not isinstance(found[key], kind):
            raise ValueError(f"{what} has {str(found[key])[:40]!r} as {key}")
