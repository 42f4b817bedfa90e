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

import torch
from torch import Tensor

from adpo.core import signals as known_signals
from adpo.core.ties import merge_ties

ORDERS = ("rewards", "ranks")  # whose ties are merged


@dataclass(frozen=True)
class Evidence:
    """What a target may look at: float64, detached, masked cells zero, tied rewards and ranks equal."""

    mask: Tensor  # [groups, K], bool
    anchor_logp: Tensor  # [groups, K]
    tau: Tensor  # [groups, 1] or [1, 1]
    signals: Mapping[str, Tensor]
    faults: list[Tensor] = field(default_factory=list)  # [groups] each: bad input that could not be refused

    def refuse(self, name: str, values: Tensor, bad: Tensor, expected: str) -> None:
        """As the function, which see."""
        self.faults.extend(refuse(name, values, bad, expected))

    def poison(self) -> Tensor:
        """``[groups]``: NaN for groups with a fault, zero for others."""
        bad = torch.zeros_like(self.mask[:, 0])
        for fault in self.faults:
            bad = bad | fault
        return torch.where(bad, torch.nan, 0.0).to(torch.float64)

    def need(self, asker: str, *names: str) -> tuple[str, Tensor]:
        """The one signal among ``names`` that was given, with its name."""
        given = [name for name in names if name in self.signals]
        wanted = " or ".join(f"`{name}`" for name in names)
        if len(given) > 1:
            both = " and ".join(f"`{name}`" for name in given)
            raise ValueError(f"{asker} got {both}; it takes one of {wanted}: leave the other out")
        if not given:
            had = ", ".join(f"`{name}`" for name in self.signals) or "no signal"
            raise ValueError(f"{asker} needs the signal {wanted}; got {had}")
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
    """Arrange ``[rows]`` values in the cells that `from_flat` gave their rows; other cells hold zero."""
    cells = torch.zeros(shape[0] * shape[1], dtype=values.dtype, device=values.device)
    return cells.index_put((index,), values).reshape(shape)


def to_flat(table: Tensor, index: Tensor) -> Tensor:
    """The ``[rows]`` values of a ``[groups, K]`` table, in the order of the rows `from_flat` was given."""
    return table.reshape(-1)[index]


def result_dtype(logp: Tensor) -> torch.dtype:
    """float64 for float64 input, float32 for everything narrower."""
    return torch.float64 if logp.dtype == torch.float64 else torch.float32


def tau_column(tau: float | Tensor, groups: int, device: torch.device) -> Tensor:
    """The temperature as a float64 column, ``[1, 1]`` for a number and ``[groups, 1]`` for a tensor."""
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


def enter(
    logp: Tensor,
    anchor_logp: Tensor | None,
    mask: Tensor | None,
    tau: float | Tensor,
    signals: Mapping[str, Tensor | None],
) -> tuple[Tensor, Evidence]:
    """Check everything a caller handed over and bring it into float64: ``(logp, evidence)``."""
    if logp.ndim != 2 or logp.shape[1] == 0 or not logp.is_floating_point():
        raise ValueError(f"logp must be a floating-point [groups, K] table, K >= 1; got {_described(logp)}")
    if mask is None:
        mask = torch.ones_like(logp, dtype=torch.bool)
    elif mask.shape != logp.shape or mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"mask must be bool or int {list(logp.shape)}, like logp; got {_described(mask)}")
    else:
        mask = mask.to(torch.bool, copy=True)  # it may be one of inference mode, too
    if anchor_logp is None:
        anchor_logp = torch.zeros_like(logp)
    column = tau_column(tau, len(logp), logp.device)
    faults = [column.isnan().any(-1)] if transformed() else []
    table = _clean("logp", logp, mask, faults)
    anchor = _clean("anchor_logp", anchor_logp, mask, faults).detach()
    cleaned: dict[str, Tensor] = {}
    for name, values in signals.items():
        if name not in known_signals.NAMES:
            close = get_close_matches(name, known_signals.NAMES, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known signals: {', '.join(known_signals.NAMES)}"
            raise TypeError(f"unknown signal `{name}`; {hint}")
        if values is not None:
            known = mask if name in known_signals.PER_CANDIDATE else mask.any(1)
            clean = _clean(name, torch.as_tensor(values, device=logp.device), known, faults).detach()
            cleaned[name] = merge_ties(clean, mask) if name in ORDERS else clean
    return table, Evidence(mask, anchor, column, cleaned, faults)


def refuse(name: str, values: Tensor, bad: Tensor, expected: str) -> list[Tensor]:
    """Raise a `ValueError` that names the first cell where ``bad`` holds.

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
    """Whether `torch.compile` or `torch.func` is at work, and no value is there to be looked at."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def _clean(name: str, values: Tensor, known: Tensor, faults: list[Tensor]) -> Tensor:
    if values.shape != known.shape:
        kind = "one per group" if known.ndim == 1 else "like logp"
        raise ValueError(f"{name} must be {list(known.shape)}, {kind}; got {_described(values)}")
    table = torch.where(known, _float64(values), 0.0)
    seen = table.detach()
    faults.extend(refuse(name, seen, ~torch.isfinite(seen), "a finite value (or mask it out)"))
    return table


def _float64(values: Tensor) -> Tensor:
    return values.to(torch.float64, copy=True)  # a tensor of inference mode cannot enter a graph, a copy can


def _described(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
