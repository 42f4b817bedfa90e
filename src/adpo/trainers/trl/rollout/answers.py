"""The final answers of a group: how much they agree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def entropy(answers: Sequence[str], size: int) -> float:
    """Entropy of the answers inside a group over log(group size), mean over groups; 0 where all agree.

    >>> entropy(["7", "7", "1", "2"], 2)
    0.5
    """
    if size < 2:
        return 0.0
    total, groups = 0.0, len(answers) // size
    for group in _groups(answers, size):
        total -= sum(n / size * math.log(n / size) for n in Counter(group).values())
    return min(1.0, max(0.0, total / groups / math.log(size)))


def distinct(answers: Sequence[str], size: int) -> float:
    """Mean number of different answers in a group.

    >>> distinct(["7", "7", "1", "2"], 2)
    1.5
    """
    groups = _groups(answers, size)
    return sum(len(set(group)) for group in groups) / len(groups)


def _groups(answers: Sequence[str], size: int) -> list[Sequence[str]]:
    return [answers[start : start + size] for start in range(0, len(answers) // size * size, size)]
