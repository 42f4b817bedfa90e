"""Problems from files: GSM8K and data in the style of MATH, as JSON lines.

    rows = load("gsm8k/train.jsonl")                     # question, answer with "#### 42" at its end
    rows = load("math/train.jsonl", levels=[3, 4])       # problem, solution with a boxed answer, level

Every row becomes a `Problem` whose answer is what a verifier compares with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from adpo.lm.tasks import Problem

_LEVEL = re.compile(r"(?:Level )?([0-9]+|\?)")  # MATH has problems of "Level ?"
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$.]+)")


def load(path: str | Path, levels: Collection[int] | None = None, limit: int | None = None) -> list[Problem]:
    """The problems of a file, in its order; of these ``levels`` alone, at most ``limit`` of them."""
    return _chosen(read_rows(Path(path)), str(path), levels, limit)


def of_rows(rows: Iterable[dict[str, Any]], name: str, levels: Collection[int] | None = None) -> list[Problem]:
    """The problems of rows that are at hand, such as those of a `datasets.Dataset`."""
    return _chosen(enumerate(rows, 1), name, levels, None)


def _chosen(
    rows: Iterable[tuple[int, dict[str, Any]]], name: str, levels: Collection[int] | None, limit: int | None
) -> list[Problem]:
    found: list[Problem] = []
    for number, row in rows:
        problem = _problem(row, f"{name}, line {number}")
        if levels is None or problem.level in levels:
            found.append(problem)
        if limit is not None and len(found) == limit:
            break
    if not found:
        wanted = f" of levels {sorted(levels)}" if levels is not None else ""
        raise ValueError(f"{name} holds no problems{wanted}")
    return found


def refuse_overlap(train: Collection[Problem], test: Collection[Problem]) -> None:
    """No question may be trained on and tested on."""
    both = {problem.question for problem in train} & {problem.question for problem in test}
    if both:
        raise ValueError(f"{len(both)} questions are in both training and test data, such as: {min(both)[:80]!r}")


def final_answer(text: str) -> str | None:
    """What comes after ``####``, or the content of the last box; None if there is neither.

    >>> final_answer("so it is #### 1,200"), final_answer(r"hence $\\boxed{x^{2}}$"), final_answer("who knows")
    ('1200', 'x^{2}', None)
    """
    if "####" in text:
        return _THOUSANDS.sub("", text.rsplit("####", 1)[1].strip()) or None
    start = text.rfind("\\boxed{")
    if start < 0:
        bare = _BARE_BOX.findall(text)
        return bare[-1] if bare else None
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end].strip() or None
    return None


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file of JSON lines."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file; expected JSON lines of problems")
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
                    yield number, row
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def _problem(row: dict[str, Any], place: str) -> Problem:
    for question, solution in (("question", "answer"), ("problem", "solution")):
        if question in row and solution in row:
            break
    else:
        raise ValueError(f"{place}: expected question and answer, or problem and solution; got {sorted(row)}")
    text, worked = row[question], row[solution]
    if not isinstance(text, str) or not isinstance(worked, str) or not text.strip():
        raise ValueError(f"{place}: {question} and {solution} must be text")
    answer = final_answer(worked)
    if answer is None:
        raise ValueError(f"{place}: {solution} holds no final answer (neither #### nor \\boxed)")
    level = _LEVEL.fullmatch(str(row.get("level", 0)))
    if level is None:
        raise ValueError(f'{place}: level must be a number or "Level 3"; got {row["level"]!r}')
    return Problem("math", int(level[1]) if level[1] != "?" else 0, text, text, answer)
