"""Arithmetic that a model wrote, evaluated without executing it.

Text goes through Python's parser, never its interpreter: the tree may hold whole numbers, parentheses and the four
operations, and nothing else. Length, nesting and the size of every intermediate value are bounded.
"""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from typing import NamedTuple

MAX_CHARACTERS = 200
MAX_DIGITS = 12
MAX_BITS = 256  # of numerator and denominator, at every step

_ALLOWED = re.compile(r"[0-9+\-*/() ]*")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "[": "(", "]": ")"})


class NotArithmeticError(ValueError):
    """The text is not an expression of the kind that is allowed."""


class Value(NamedTuple):
    """What an expression is worth, and the numbers it was written with, in order."""

    value: Fraction
    numbers: list[int]


def evaluate(text: str) -> Value:
    """The exact value of ``text``.

    >>> evaluate("(3 + 5) / 6").value
    Fraction(4, 3)
    """
    spelled = text.strip().translate(_SPELLINGS)
    if not spelled or len(spelled) > MAX_CHARACTERS or not _ALLOWED.fullmatch(spelled):
        raise NotArithmeticError("not an arithmetic expression")
    try:
        tree = ast.parse(spelled, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotArithmeticError("not an arithmetic expression") from None
    numbers: list[int] = []
    return Value(_value(tree.body, numbers), numbers)


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        if len(str(node.value)) > MAX_DIGITS:
            raise NotArithmeticError(f"a number of more than {MAX_DIGITS} digits")
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand, numbers)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        return _bounded(_combined(node.op, _value(node.left, numbers), _value(node.right, numbers)))
    raise NotArithmeticError("only + - * / and whole numbers are allowed")


def _combined(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Sub):
        return left - right
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Div):
        if right == 0:
            raise NotArithmeticError("a division by zero")
        return left / right
    raise NotArithmeticError("only + - * / and whole numbers are allowed")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotArithmeticError("a value too large")
    return value
