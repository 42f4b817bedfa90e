"""What a target may be given of a group's candidates, by name.

`Signals` types the keyword arguments of every method that takes them, so that an editor completes the names and a
type checker finds a typo; at run time an unknown name is an error that suggests the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, cast

from torch import Tensor


class Signals(TypedDict, total=False):
    """Keyword arguments; None is the same as leaving one out."""

    rewards: Tensor | None  # [groups, K], higher is better
    ranks: Tensor | None  # [groups, K], 1 is the best; equal ranks are ties
    teacher_logp: Tensor | None  # [groups, K], log-probabilities of a teacher
    q: Tensor | None  # [groups, K], a distribution over the candidates
    positions: Tensor | None  # [groups, K], places on a line, for transport
    labels: Tensor | None  # [groups], the index of a candidate
    preference: Tensor | None  # [groups], how often candidate 0 is preferred to candidate 1


PER_GROUP = ("labels", "preference")
NAMES = tuple(Signals.__annotations__)
PER_CANDIDATE = tuple(name for name in NAMES if name not in PER_GROUP)


def by_name(signals: Signals) -> Mapping[str, Tensor | None]:
    """The same, as a mapping whose values have a type."""
    return cast(Mapping[str, Tensor | None], signals)
