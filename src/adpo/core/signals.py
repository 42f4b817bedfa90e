"""What may be given of a group beside log-probabilities, by name.

`Signals` and `Inputs` type the keyword arguments of every method that takes them, so that an editor completes the
names and a type checker finds a typo; at run time an unknown name is an error that suggests the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, cast

from torch import Tensor


class Signals(TypedDict, total=False):
    """Keyword arguments; None is the same as leaving one out."""

    rewards: Tensor | None  # [groups, K], higher is better
    ranks: Tensor | None  # [groups, K], 1 is the best; equal ranks are ties
    teacher_logp: Tensor | None  # [groups, K], log-probabilities of a teacher; -inf is no mass
    q: Tensor | None  # [groups, K], a distribution over the candidates
    positions: Tensor | None  # [groups, K], places on a line, for transport
    labels: Tensor | None  # [groups], the index of a candidate
    preference: Tensor | None  # [groups], how often candidate 0 is preferred to candidate 1
    weights: Tensor | None  # [groups], at least 0: how much each group counts; of no use to a target


class Inputs(Signals, total=False):
    """What a table needs besides: which cells are real, and a temperature in place of the objective's own."""

    mask: Tensor | None  # [groups, K], bool or int, true on real candidates
    tau: float | Tensor | None  # a number or [groups]


PER_GROUP = ("labels", "preference", "weights")
NAMES = tuple(Signals.__annotations__)
PER_CANDIDATE = tuple(name for name in NAMES if name not in PER_GROUP)


def by_name(signals: Signals) -> Mapping[str, Tensor | None]:
    """The same, as a mapping whose values have a type.

    >>> by_name({"rewards": None})
    {'rewards': None}
    """
    return cast(Mapping[str, Tensor | None], signals)
