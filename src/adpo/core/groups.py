"""Groups of candidates: ``[groups, K]`` tables, the way in from flat rows, and the checks at the boundary.

A table has one row per group and one column per candidate. Groups may be ragged: ``mask`` is true on
real candidates, and what the other cells hold (NaN included) never matters. Inside ``core`` every table
is float64, masked cells are zero, and no value but ``logp`` carries a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from adpo.core.signals import NAMES, PER_CANDIDATE, Inputs
from adpo.core.ties import merge_ties
from adpo.deprecated import renamed

ORDERS = ("rewards", "ranks")  # whose ties are merged


@dataclass(frozen=True)
class Groups:
    """What a target may look at: float64, detached, masked cells zero, tied rewards and ranks equal."""

    mask: Tensor  # [groups, K], bool
    anchor_logp: Tensor  # [groups, K]
    tau: Tensor  # [groups, 1] or [1, 1]
    weight: Tensor  # [groups], of each group in the mean; 0 for padding groups, else 1 unless weights were given
    signals: Mapping[str, Tensor]
    faults: list[Tensor] = field(default_factory=list)  # [groups] each: bad input that could not be refused

    def refuse(self, name: str, values: Tensor, bad: Tensor, expected: str) -> None:
        """Raise where ``bad`` holds; where that cannot be known, take down which groups are bad (`refuse`)."""
        self.faults.extend(refuse(name, values, bad, expected))

    def poison(self) -> Tensor:
        """``[groups]``: NaN for groups with a fault, zero for others."""
        bad = torch.zeros_like(self.mask[:, 0])
        for fault in self.faults:  # that of tau may be [1]
            bad = bad | fault
        return torch.where(bad, torch.nan, 0.0).to(torch.float64)

    def need(self, caller: str, *names: str) -> tuple[str, Tensor]:
        """The one signal among ``names`` that was given, with its name.

        >>> _, groups = prepare(torch.zeros(1, 2), None, 1.0, {"rewards": torch.tensor([[1, 0]])})
        >>> groups.need("my_target()", "rewards", "ranks")
        ('rewards', tensor([[1., 0.]], dtype=torch.float64))
        """
        given = [name for name in names if name in self.signals]
        wanted = " or ".join(f"`{name}`" for name in names)
        if len(given) > 1:
            both = " and ".join(f"`{name}`" for name in given)
            raise ValueError(f"{caller} got {both}; it takes one of {wanted}: leave the other out")
        if not given:
            had = ", ".join(f"`{name}`" for name in self.signals) or "no signal"
            raise ValueError(f"{caller} needs the signal {wanted}; got {had}")
        return given[0], self.signals[given[0]]


def from_flat(values: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arrange flat rows, in any order, as a table: ``(table, mask, index)``.

    ``values`` and the integer ``group_ids`` are ``[rows]``. Groups appear in ascending order of their id,
    candidates in the order of their rows, padding cells hold zero. ``index[row]`` is the row's cell in the
    flattened table: `to_flat` takes a table back, `to_table` arranges further values the same way.
    Gradients pass through.

    >>> table, mask, index = from_flat(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7, 4, 7]))
    >>> table.tolist(), mask.tolist()
    ([[2.0, 0.0], [1.0, 3.0]], [[True, False], [True, True]])
    >>> to_flat(table, index).tolist()
    [1.0, 2.0, 3.0]
    """
    if values.ndim != 1 or values.shape != group_ids.shape:
        raise ValueError(
            f"values and group_ids must both be [rows]; got {list(values.shape)} and {list(group_ids.shape)}"
        )
    if group_ids.is_floating_point() or group_ids.is_complex() or group_ids.dtype == torch.bool:
        raise ValueError(f"group_ids must be integers; got {group_ids.dtype}")
    rows = len(group_ids)
    ids, group, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    width = int(counts.max()) if rows else 1
    order = torch.argsort(group, stable=True)
    first_row = counts.cumsum(0) - counts
    slot = torch.arange(rows, device=group.device) - first_row[group[order]]
    index = torch.empty_like(order)
    index[order] = group[order] * width + slot
    shape = (len(ids), width)
    mask = to_table(torch.ones_like(group, dtype=torch.bool), index, shape)
    return to_table(values, index, shape), mask, index


def to_table(values: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """Arrange ``[rows]`` values in the cells that `from_flat` gave their rows; other cells hold zero.

    >>> to_table(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 3]), (2, 2)).tolist()
    [[2.0, 0.0], [1.0, 3.0]]
    """
    cells = torch.zeros(shape[0] * shape[1], dtype=values.dtype, device=values.device)
    return cells.index_put((index,), values).reshape(shape)


def to_flat(table: Tensor, index: Tensor) -> Tensor:
    """The ``[rows]`` values of a ``[groups, K]`` table, in the order of the rows `from_flat` was given.

    >>> to_flat(torch.tensor([[2.0, 0.0], [1.0, 3.0]]), torch.tensor([2, 0, 3])).tolist()
    [1.0, 2.0, 3.0]
    """
    return table.reshape(-1)[index]


def result_dtype(logp: Tensor) -> torch.dtype:
    """float64 for float64 input, float32 for everything narrower.

    >>> result_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.float64 if logp.dtype == torch.float64 else torch.float32


def positive(name: str, value: float) -> float:
    """The value, or one line that says what is wrong with it.

    >>> positive("beta", -1)
    Traceback (most recent call last):
        ...
    ValueError: beta must be positive and finite; got -1
    """
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite; got {value}")
    return value


def tau_column(tau: float | Tensor, groups: int, device: torch.device) -> Tensor:
    """The temperature as a float64 column, ``[1, 1]`` for a number and ``[groups, 1]`` for a tensor.

    >>> tau_column(torch.tensor([0.5, 2.0]), 2, torch.device("cpu")).tolist()
    [[0.5], [2.0]]
    """
    if not isinstance(tau, Tensor):
        if not 0 < tau < math.inf:  # not isfinite: this is traced where a compiled caller's tau changes
            raise ValueError(f"tau must be a positive finite number; got {tau}")
        return torch.full((1, 1), tau, dtype=torch.float64, device=device)
    column = _float64(tau.to(device)).detach()
    if column.ndim > 1 or column.numel() not in (1, groups):
        raise ValueError(f"tau must be a number or [groups] = [{groups}]; got {list(column.shape)}")
    column = column.reshape(-1, 1)
    bad = ~(torch.isfinite(column) & (column > 0))
    return torch.where(bad, torch.nan, column) if refuse("tau", column, bad, "positive and finite") else column


def prepare(logp: Tensor, anchor_logp: Tensor | None, tau: float, inputs: Inputs) -> tuple[Tensor, Groups]:
    """Check everything a caller handed over and bring it into float64: ``(logp, groups)``.

    ``tau`` is the temperature where ``inputs`` hold none; an anchor of None is zero.

    >>> logp, groups = prepare(torch.zeros(1, 2), None, 0.5, {"mask": torch.tensor([[1, 0]])})
    >>> logp.dtype, groups.mask.tolist(), groups.tau.tolist(), groups.weight.tolist()
    (torch.float64, [[True, False]], [[0.5]], [1.0])
    """
    if logp.ndim != 2 or logp.shape[1] == 0 or not logp.is_floating_point():
        raise ValueError(f"logp must be a floating-point [groups, K] table, K >= 1; got {_described(logp)}")
    given = {name: values for name, values in inputs.items() if values is not None}
    mask = cast(Tensor, given.pop("mask", torch.ones_like(logp, dtype=torch.bool)))
    if mask.shape != logp.shape or mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"mask must be bool or int {list(logp.shape)}, like logp; got {_described(mask)}")
    mask = mask.to(torch.bool, copy=True)  # it may be one of inference mode, too
    column = tau_column(cast(float | Tensor, given.pop("tau", tau)), len(logp), logp.device)
    faults = [column.isnan().any(-1)] if transformed() else []
    table = _clean("logp", logp, mask, faults)
    anchor = torch.zeros_like(table) if anchor_logp is None else _clean("anchor_logp", anchor_logp, mask, faults)
    real, signals = mask.any(-1), {}
    for name, values in given.items():
        if name not in NAMES:
            close = get_close_matches(name, ("mask", "tau", *NAMES), n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known signals: {', '.join(NAMES)}"
            raise TypeError(f"unknown signal `{name}`; {hint}")
        cells = mask if name in PER_CANDIDATE else real
        clean = _clean(name, torch.as_tensor(values, device=logp.device), cells, faults).detach()
        signals[name] = merge_ties(clean, mask) if name in ORDERS else clean
    weight = signals.pop("weights", real.to(torch.float64))
    faults.extend(refuse("weights", weight, weight < 0, "a weight of at least 0"))
    return table, Groups(mask, anchor.detach(), column, weight, signals, faults)


def refuse(name: str, values: Tensor, bad: Tensor, expected: str) -> list[Tensor]:
    """Raise a `ValueError` that names the first cell where ``bad`` holds; ``[groups]`` or ``[groups, K]`` both.

    >>> refuse("q", torch.tensor([[0.5, -1.0]]), torch.tensor([[False, True]]), "a probability")
    Traceback (most recent call last):
        ...
    ValueError: q at group 0, candidate 1 is -1.0; expected a probability

    The only data-dependent branch of ``core``. Under `torch.func` and `torch.compile` the values are not there to
    be looked at: which groups are bad comes back, ``[groups]``, and loss and coefficients of those are NaN.
    """
    if transformed():
        return [bad.any(-1) if bad.ndim == 2 else bad]
    if not bool(bad.any()):
        return []
    cell = [int(i) for i in bad.nonzero()[0]]
    place = f"group {cell[0]}" + (f", candidate {cell[1]}" if values.ndim == 2 and values.shape[1] > 1 else "")
    raise ValueError(f"{name} at {place} is {values[tuple(cell)].item()}; expected {expected}")


def transformed() -> bool:
    """Whether `torch.compile` or `torch.func` is at work, and no value is there to be looked at.

    >>> transformed(), torch.func.vmap(lambda x: x + transformed())(torch.zeros(1)).tolist()
    (False, [1.0])
    """
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def _clean(name: str, values: Tensor, real: Tensor, faults: list[Tensor]) -> Tensor:
    if values.shape != real.shape:
        kind = "one per group" if real.ndim == 1 else "like logp"
        raise ValueError(f"{name} must be {list(real.shape)}, {kind}; got {_described(values)}")
    table = torch.where(real, _float64(values), 0.0)
    detached = table.detach()
    # A teacher may give a candidate no mass at all.
    bad = ~torch.isfinite(detached) & ((detached != -torch.inf) | (name != "teacher_logp"))
    faults.extend(refuse(name, detached, bad, "a finite value (or mask it out)"))
    return table


def _float64(values: Tensor) -> Tensor:
    return values.to(torch.float64, copy=True)  # a tensor of inference mode cannot enter a graph, a copy can


def _described(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
