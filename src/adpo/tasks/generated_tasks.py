"""Tasks with verifiable rewards: generated, seeded, in levels of difficulty.

A problem is a prompt and what its answer must satisfy. Whether a problem is for training or for testing is a
property of its text, so the two never mix, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from adpo.tasks.expressions import NotArithmeticError, evaluate

Split = Literal["train", "test"]
TEST_SHARE = 0.1
LEVELS = 5
LETTER = "letter"
"""The kind of questions with choices, which come from files."""
LETTERS = "ABCDEFGHIJ"
PATIENCE = 2000  # draws without a new problem, after which a level is taken to have no more


class Outcome(StrEnum):
    """What became of an answer."""

    correct = "correct"
    wrong = "wrong"
    unparsable = "unparsable"
    timed_out = "timed out"


@dataclass(frozen=True)
class Problem:
    """``answer`` is what the task's check compares with: a result, or the numbers and target of a countdown."""

    task: str
    level: int
    prompt: str  # bare, as for a model of characters: "12+34="
    question: str  # in words, for a model that chats
    answer: str


@dataclass(frozen=True)
class Task:
    """How problems are made at each level, and how an answer is checked."""

    name: str
    make: Callable[[random.Random, int], tuple[str, str, str]]  # prompt, question, answer
    check: Callable[[str, str], Outcome]  # answer, what the model gave
    alike: Callable[[str], str] = str  # of a prompt: what it shares with those that say its answer

    def problem(self, draw: random.Random, level: int) -> Problem:
        return Problem(self.name, level, *self.make(draw, level))


def split_of(problem: Problem) -> Split:
    """Where a problem belongs, from its prompt alone."""
    return "test" if held_out(f"{problem.task}|{alike(problem)}") else "train"


def alike(problem: Problem) -> str:
    """What a problem has in common with those that say its answer: its prompt, of sums in either order."""
    return TASKS[problem.task].alike(problem.prompt) if problem.task in TASKS else problem.prompt


def held_out(text: str) -> bool:
    """Whether a text belongs to the tenth that is kept for testing: a property of the text itself."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]) < TEST_SHARE * 2**64


def problems(task: str, count: int, *, level: int, seed: int, split: Split = "train") -> list[Problem]:
    """Distinct problems of one level; the same seed gives the same problems.

    >>> [p.prompt for p in problems("arithmetic", 2, level=2, seed=0)]
    ['67+97=', '30+54=']
    """
    found = up_to(task, count, level=level, seed=seed, split=split)
    if len(found) < count:
        raise ValueError(f"{task} at level {level} has only about {len(found)} {split} problems, not {count}")
    return found


def up_to(task: str, count: int, *, level: int, seed: int, split: Split = "train") -> list[Problem]:
    """As `problems`, or about as many as a small level has."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    if not 1 <= level <= LEVELS:
        raise ValueError(f"level must be between 1 and {LEVELS}; got {level}")
    draw = random.Random(f"{task}|{level}|{seed}|{split}")
    found: dict[str, Problem] = {}
    in_vain = 0
    while len(found) < count and in_vain < PATIENCE:
        problem = TASKS[task].problem(draw, level)
        in_vain += 1
        if problem.prompt not in found and split_of(problem) == split:
            found[problem.prompt] = problem
            in_vain = 0
    return list(found.values())


def check(task: str, answer: str, given: str) -> Outcome:
    """Whether ``given``, the final answer of a model, solves the problem."""
    if len(given) > 10_000 or "\0" in given:
        return Outcome.unparsable
    return _same_letter(answer, given) if task == LETTER else TASKS[task].check(answer, given)


_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_LETTER = re.compile(r"\(?([A-Za-z])(?![A-Za-z'])")


def _same_number(answer: str, given: str) -> Outcome:
    stripped = given.strip().replace(",", "").rstrip(".")
    if not _WHOLE.fullmatch(stripped):
        return Outcome.unparsable
    return Outcome.correct if int(stripped) == int(answer) else Outcome.wrong


def _same_list(answer: str, given: str) -> Outcome:
    parts = given.replace(",", " ").split()
    if not parts or len(parts) > 100 or not all(_WHOLE.fullmatch(part) for part in parts):
        return Outcome.unparsable
    return Outcome.correct if [int(part) for part in parts] == [int(p) for p in answer.split()] else Outcome.wrong


def _reaches_target(answer: str, given: str) -> Outcome:
    """``answer`` is "numbers=target": each number may be used once, the value must be the target."""
    numbers, target = answer.split("=")
    left = given.split("=")[0]  # "3*5+2=17" states its result as well
    try:
        value, used = evaluate(left)
    except NotArithmeticError:
        return Outcome.unparsable
    available = [int(number) for number in numbers.split()]
    for number in used:
        if number not in available:
            return Outcome.wrong
        available.remove(number)
    return Outcome.correct if value == int(target) else Outcome.wrong


def _same_letter(answer: str, given: str) -> Outcome:
    """One letter, alone or before a dot or bracket: "B", "(B)", "B. the second"."""
    found = _LETTER.match(given.strip())
    if found is None:
        return Outcome.unparsable
    return Outcome.correct if found[1].upper() == answer else Outcome.wrong


def _arithmetic(draw: random.Random, level: int) -> tuple[str, str, str]:
    """Sums, then differences, then products, then two steps."""
    high = (9, 99, 99, 999, 99)[level - 1]
    a, b = draw.randint(0, high), draw.randint(0, high)
    text, value = f"{a}+{b}", a + b
    if level >= 3 and draw.random() < 0.5:
        text, value = f"{a}-{b}", a - b
    if level == 4 and draw.random() < 0.5:
        b = draw.randint(2, 9)
        text, value = f"{a}*{b}", a * b
    if level == 5:
        c = draw.randint(2, 9)
        text, value = f"({text})*{c}", value * c
    return f"{text}=", f"What is {text}?", str(value)


def _sums(draw: random.Random, level: int) -> tuple[str, str, str]:
    a, b = (draw.randint(0, 10**level - 1) for _ in "ab")
    return f"{a}+{b}=", f"What is {a}+{b}?", str(a + b)


def _either_order(prompt: str) -> str:
    """
    >>> _either_order("69+47=") == _either_order("47+69=") == "47+69="
    True
    """
    return "+".join(sorted(prompt.removesuffix("=").split("+"))) + "="


def _modulo(draw: random.Random, level: int) -> tuple[str, str, str]:
    a, b = draw.randint(10, 10 ** (level + 1)), draw.randint(2, 10 * level)
    return f"{a}%{b}=", f"What is the remainder of {a} divided by {b}?", str(a % b)


def _sorting(draw: random.Random, level: int) -> tuple[str, str, str]:
    numbers = [draw.randint(0, 99) for _ in range(level + 2)]
    shown = " ".join(map(str, numbers))
    question = f"Sort these numbers from smallest to largest: {shown}"
    return f"sort {shown}=", question, " ".join(map(str, sorted(numbers)))


def _sequence(draw: random.Random, level: int) -> tuple[str, str, str]:
    """The next term: constant steps, from level 3 on steps that grow."""
    start, step, growth = draw.randint(0, 50), draw.randint(1, 5 * level), draw.randint(1, 3) if level >= 3 else 0
    terms = [start]
    for i in range(5):
        terms.append(terms[-1] + step + i * growth)
    shown = " ".join(map(str, terms[:-1]))
    return f"next {shown}=", f"What comes next: {shown}?", str(terms[-1])


def _countdown(draw: random.Random, level: int) -> tuple[str, str, str]:
    """A target that some of the numbers reach, for it was made from them."""
    numbers = [draw.randint(1, 9 + 4 * level) for _ in range(level + 1 if level > 1 else 3)]
    value = numbers[0]
    for number in numbers[1:]:
        operation = draw.choice("+-*") if value < 100 else draw.choice("+-")
        value = value + number if operation == "+" else value - number if operation == "-" else value * number
    draw.shuffle(numbers)
    shown = " ".join(map(str, numbers))
    question = f"Using each of {shown} at most once with + - * /, write an expression equal to {value}."
    return f"{shown}->{value}:", question, f"{shown}={value}"


TASKS = {
    task.name: task
    for task in (
        Task("arithmetic", _arithmetic, _same_number),
        Task("countdown", _countdown, _reaches_target),
        Task("modulo", _modulo, _same_number),
        Task("sequence", _sequence, _same_number),
        Task("sorting", _sorting, _same_list),
        Task("sums", _sums, _same_number, _either_order),
    )
}
