"""Worked solutions for problems that come with an answer and no solution: the calculation that explains it.

All numbers of a problem are combined; where exactly one calculation gives the answer, whatever the order of its
terms, it is taken for the solution. It may be right for a wrong reason, which is rare with two or three numbers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from itertools import permutations
from typing import NamedTuple

_NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
Way = tuple["Step", ...]


class Step(NamedTuple):
    """``left sign right = result``."""

    left: Fraction
    sign: str
    right: Fraction
    result: Fraction

    def __str__(self) -> str:
        return f"{shown(self.left)} {self.sign} {shown(self.right)} = {shown(self.result)}"


def worked(question: str, answer: str) -> str | None:
    """Calculations, line by line, and the answer behind ####; none where there is none, or more than one.

    >>> print(worked("Kaleb bought 14 boxes and gave 5 away. Each has 6 pieces. How many are left?", "54"))
    14 - 5 = 9
    9 * 6 = 54
    #### 54
    >>> worked("He had 2 apples and got 2 more.", "4")  # 2 + 2, or 2 * 2
    """
    numbers = [Fraction(found.replace(",", "")) for found in _NUMBER.findall(question)]
    if len(numbers) not in (2, 3):
        return None
    wanted = Fraction(answer.replace(",", ""))
    for ways in [_one_step(numbers)] if len(numbers) == 2 else [_two_steps(numbers), _one_step(numbers)]:
        right: dict[Hashable, Way] = {}
        for way in ways:
            if way[-1].result == wanted:
                right.setdefault(_whatever_the_order(way), way)
        if right:
            way, *others = right.values()
            return None if others else "\n".join([*map(str, way), f"#### {shown(wanted)}"])
    return None


def _one_step(numbers: Sequence[Fraction]) -> Iterator[Way]:
    for left, right in permutations(numbers, 2):
        yield from ((step,) for step in _steps(left, right))


def _two_steps(numbers: Sequence[Fraction]) -> Iterator[Way]:
    for left, right, third in permutations(numbers, 3):
        for first in _steps(left, right):
            yield from ((first, then) for then in _steps(first.result, third))
            yield from ((first, then) for then in _steps(third, first.result) if then.sign in "-/")


def _steps(left: Fraction, right: Fraction) -> Iterator[Step]:
    """Results that a count may have: none is negative."""
    yield Step(left, "+", right, left + right)
    yield Step(left, "*", right, left * right)
    if left >= right:
        yield Step(left, "-", right, left - right)
    if right not in (0, 1):
        yield Step(left, "/", right, left / right)


def _whatever_the_order(way: Way) -> Hashable:
    """The same for calculations that differ in the order of their terms, or of their factors, alone."""
    first, *more = way
    inverse = {"+": False, "*": False, "-": True, "/": True}
    terms = [(first.left, False), (first.right, inverse[first.sign])]
    kinds = {step.sign in "+-" for step in way}
    if len(kinds) == 2:
        (then,) = more
        inner = _whatever_the_order((first,))
        outside = then.right if then.left == first.result else then.left
        return (inner, then.sign, outside, then.left == first.result or then.sign in "+*")
    for then in more:
        if then.left == first.result:
            terms.append((then.right, inverse[then.sign]))
        else:
            terms = [(number, not turned) for number, turned in terms] + [(then.left, False)]
    return (kinds.pop(), tuple(sorted(terms)))


def shown(number: Fraction) -> str:
    """As a problem would write it: whole, with decimals, or else as a fraction.

    >>> shown(Fraction(54)), shown(Fraction(1046, 100)), shown(Fraction(1, 3))
    ('54', '10.46', '1/3')
    """
    for decimals in range(5):
        if (number * 10**decimals).denominator == 1:
            return f"{float(number):.{decimals}f}"
    return str(number)
