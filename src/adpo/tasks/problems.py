"""Problems from files of JSON lines, by the fields of GSM8K, MATH, SVAMP, MAWPS, ARC or MMLU.

    rows = load("gsm8k/train.jsonl")                     # question, answer with "#### 42" at its end
    rows = load("math/train.jsonl", levels=[3, 4])       # problem, solution with a boxed answer, level
    rows = load("svamp/test.jsonl")                      # Body, Question, Answer
    rows = load("mawps/test.jsonl")                      # input, target
    rows = load("arc/test.jsonl")                        # question, choices with text and label, answerKey
    rows = load("mmlu/test.jsonl")                       # question, choices, answer: the number of a choice

Every row becomes a `Problem` whose answer is what a verifier compares with.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from adpo.tasks.generated_tasks import LETTERS, Problem

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
        with path.open(encoding="utf-8-sig") as lines:  # editors on Windows begin a file with a mark
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:  # brackets within brackets, a number of thousands of digits
        raise ValueError(f"{place}: not JSON that can be read ({str(error)[:80]})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object, got {type(row).__name__}")
    return row


def _problem(row: dict[str, Any], place: str) -> Problem:
    """By the names of its fields."""
    for names, read in _READERS.items():
        if all(name in row for name in names):
            text, task, answer = read(row, place)
            level = _LEVEL.fullmatch(str(row.get("level", 0)))
            if level is None:
                raise ValueError(f'{place}: level must be a number or "Level 3"; got {row["level"]!r}')
            return Problem(task, int(level[1]) if level[1] != "?" else 0, text, text, answer)
    if "prompt" in row:
        raise ValueError(
            f"{place}: a file of prompts needs a reward function of your own: --reward file.py:function (without "
            "one, rows are problems with their answers, such as question and answer)"
        )
    known = ", or ".join(" and ".join(names) for names in sorted(_READERS, key=len))
    raise ValueError(f"{place}: expected {known}; got {sorted(row)}")


Read = tuple[str, str, str]
"""The question, the kind of answer, and the answer."""


def _text(row: dict[str, Any], name: str, place: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: {name} must be text; got {value!r:.60}")
    return value


def _worked(question: str, solution: str, row: dict[str, Any], place: str) -> Read:
    """GSM8K and MATH: the final answer stands at the end of a solution."""
    text, worked = _text(row, question, place), _text(row, solution, place)
    answer = final_answer(worked)
    if answer is None:
        raise ValueError(f"{place}: {solution} holds no final answer (neither #### nor \\boxed)")
    return text, "math", answer


def _number(value: Any, place: str) -> str:
    """As a person would write it.

    >>> _number(43.0, ""), _number(33.56, ""), _number(0.8333333333, "")
    ('43', '33.56', '0.8333333333')
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{place}: the answer must be a number; got {value!r:.60}")
    return str(int(value)) if value == int(value) else f"{value:.12g}"


def _svamp(row: dict[str, Any], place: str) -> Read:
    text = f"{_text(row, 'Body', place).strip().rstrip('.')}. {_text(row, 'Question', place).strip()}"
    return text, "math", _number(row["Answer"], place)


def _mawps(row: dict[str, Any], place: str) -> Read:
    return _text(row, "input", place).strip(), "math", _number(row["target"], place)


def _arc(row: dict[str, Any], place: str) -> Read:
    choices = row["choices"]
    if not isinstance(choices, dict) or not isinstance(choices.get("text"), list):
        raise ValueError(f"{place}: choices must hold text and label; got {choices!r:.60}")
    labels = [str(label) for label in choices.get("label") or []]
    if str(row["answerKey"]) not in labels:
        raise ValueError(f"{place}: answerKey {row['answerKey']!r:.20} is none of the labels {labels}")
    return _letters(_text(row, "question", place), choices["text"], labels.index(str(row["answerKey"])), place)


def _mmlu(row: dict[str, Any], place: str) -> Read:
    return _letters(_text(row, "question", place), row["choices"], row["answer"], place)


def _letters(question: str, choices: Any, right: Any, place: str) -> Read:
    """A question with its choices, one a line, each behind a letter."""
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"{place}: expected 2 to {len(LETTERS)} choices; got {choices!r:.60}")
    if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(choices):
        raise ValueError(f"{place}: the answer must be the number of a choice, from 0; got {right!r:.20}")
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question.strip(), *lines]), "letter", LETTERS[right]


_READERS: dict[tuple[str, ...], Callable[[dict[str, Any], str], Read]] = {
    ("question", "choices", "answerKey"): _arc,
    ("question", "choices", "answer"): _mmlu,
    ("question", "answer"): partial(_worked, "question", "answer"),
    ("problem", "solution"): partial(_worked, "problem", "solution"),
    ("Body", "Question", "Answer"): _svamp,
    ("input", "target"): _mawps,
}


LIKE = 0.6
"""Share of word triples in common from which two questions are taken for variants of one."""


def without_likes_of(train: Sequence[Problem], *held_out: Sequence[Problem]) -> list[Problem]:
    """Training problems that are no variant of a held-out one: other numbers, or a few other words."""
    others = [_triples(problem.question) for problems in held_out for problem in problems]
    where: dict[str, list[int]] = {}
    for number, triples in enumerate(others):
        for triple in triples:
            where.setdefault(triple, []).append(number)
    return [problem for problem in train if not _resembles(_triples(problem.question), others, where)]


def _resembles(mine: set[str], others: list[set[str]], where: dict[str, list[int]]) -> bool:
    common = Counter(number for triple in mine for number in where.get(triple, ()))
    return any(count >= LIKE * len(mine | others[number]) for number, count in common.items())


def _triples(text: str) -> set[str]:
    """Three words in a row, whatever the numbers; a text of fewer is one piece, its numbers and formulas with it.

    >>> sorted(_triples("Ann had 5 red apples."))
    ['ann had red', 'had red apples']
    >>> sorted(_triples("Compute $2+3$."))
    ['compute $2+3$.']
    """
    words = re.findall(r"[a-z]+", text.lower())
    if len(words) < 3:
        return {" ".join(text.lower().split())}
    return {" ".join(words[at : at + 3]) for at in range(len(words) - 2)}
