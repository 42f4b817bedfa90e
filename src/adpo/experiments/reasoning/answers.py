"""What became of every problem, a string of 0 and 1, as a short text for files."""

from __future__ import annotations

import re

WATCHED = "watched"
"""Problems like those of the training, at the last look."""
RIGHT = "right"
"""What became of every problem of an exam: 0 or 1 in a run, packed in a line."""


def packed(right: str) -> str:
    """The number of problems, and their answers in hexadecimal.

    >>> packed("0010110")
    '7:16'
    """
    digits = -(-len(right) // 4)
    return f"{len(right)}:" + (f"{int(right, 2):0{digits}x}" if right else "")


def unpacked(text: str) -> str:
    """The answers of a text that `packed` has made.

    >>> unpacked("7:16")
    '0010110'
    """
    found = re.fullmatch(r"([0-9]+):([0-9a-f]*)", text)
    if found is not None:
        problems, digits = int(found[1]), found[2]
        if len(digits) == -(-problems // 4):
            right = f"{int(digits, 16):0{problems}b}" if digits else ""
            if len(right) == problems:
                return right
    raise ValueError(f"{text!r}: expected a number of problems and their answers in hexadecimal, as 7:16")
