"""Group gradients that are exact over micro-batches, shuffles and ranks.

The loss couples the members of a group, but only through a table of scalars. `backward` fills the table
without gradient, differentiates it, and back-propagates ``sum c * logp`` one micro-batch at a time: the gradient
is that of the whole-group loss, whichever rows share a micro-batch or a rank. Only ``[rows]`` scalars travel
between ranks.

Passes that the table does not need are not made: no scoring when the anchor is the policy itself (u = 0) nor
for a micro-batch that holds its groups whole, and no pass at all for rows of a group without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from adpo.core.groups import GROUP_SIGNALS, from_flat, to_flat, to_table
from adpo.core.objective import Objective, live_groups

ScoreRows = Callable[[Tensor], Tensor]
"""Log-probabilities ``[len(rows)]`` of the rows with these indices; differentiable, and the same each time."""


class GroupGradient(NamedTuple):
    """What `backward` did; ``rows`` are this rank's."""

    loss: Tensor  # mean over the groups of all ranks, before the step
    coefficients: Tensor  # [rows], dloss/dlogp
    logp: Tensor  # [rows], float64; NaN for rows that no pass had to see
    rows_scored: int  # rows that went through a forward pass without gradient
    rows_trained: int  # rows that went through forward and backward


def backward(
    objective: Objective,
    score: ScoreRows,
    micro_batches: Sequence[Tensor],
    group_ids: Tensor,
    anchor_logp: Tensor | None = None,
    *,
    tau: float | Tensor | None = None,
    at_anchor: bool = False,
    averaging: bool = False,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
    process_group: dist.ProcessGroup | None = None,
    **signals: Tensor,
) -> GroupGradient:
    """Accumulate the gradient of ``objective`` in the parameters behind ``score``.

    ``micro_batches`` is a partition of this rank's rows, in any order; ``group_ids`` (``[rows]``, one id per
    group over all ranks), ``anchor_logp`` and the signals are flat. A tensor ``tau`` and the signals that belong
    to a group (`labels`, `preference`) are ``[groups]``, in ascending order of the ids of all ranks; candidates
    count in the order of ranks, then rows.

    ``at_anchor=True`` says that the policy is the anchor. ``averaging=True`` undoes the division by the number
    of ranks that `DistributedDataParallel` makes; give it that module's ``no_sync`` to communicate once, in the
    last micro-batch.
    """
    device = group_ids.device
    _check_partition(micro_batches, len(group_ids))
    micro_batches = [batch.sort().values for batch in micro_batches]  # `labels` count rows in order
    if at_anchor and anchor_logp is None and objective.target.reads_anchor:
        raise ValueError(f"{objective.target} looks at the anchor: pass anchor_logp, at u = 0 too")
    ranks = _Ranks(process_group)
    ids, sizes = torch.unique(torch.cat(ranks.gather(group_ids)), return_counts=True)
    groups = _Groups(objective, ids, tau, signals)
    own = torch.zeros(len(group_ids), dtype=torch.float64, device=device)
    columns = {name: values for name, values in signals.items() if name not in GROUP_SIGNALS}
    columns["anchor_logp"] = own if anchor_logp is None else anchor_logp.detach()

    def whole(batch: Tensor) -> bool:
        present, count = torch.unique(group_ids[batch], return_counts=True)
        return torch.equal(count, sizes[torch.searchsorted(ids, present)])

    logp = torch.full_like(own, torch.nan)
    together = list(micro_batches) if at_anchor else [batch for batch in micro_batches if not whole(batch)]
    if not at_anchor:
        with torch.no_grad():
            for batch in together:
                logp[batch] = score(batch).to(torch.float64)
    # Groups that are spread out: one table over all ranks, the same on each of them.
    rows = torch.cat([*together, torch.empty(0, dtype=torch.long, device=device)]).sort().values
    columns["logp"] = columns["anchor_logp"] if at_anchor else logp
    shared = {name: ranks.gather(values[rows].to(torch.float64)) for name, values in columns.items()}
    shared_ids = ranks.gather(group_ids[rows])
    table_c, loss = groups.coefficients(torch.cat(shared_ids), {n: torch.cat(v) for n, v in shared.items()})
    c = torch.full_like(own, torch.nan)
    c[rows] = torch.split(table_c, [len(part) for part in shared_ids])[ranks.rank]

    own_loss = torch.zeros_like(loss)
    rows_trained = 0
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        with nullcontext() if last else no_sync():
            known = not bool(c[batch].isnan().any())
            if known:
                live = batch[c[batch] != 0]
                if len(live):
                    batch = live
                elif last and ranks.world > 1:
                    batch = batch[:1]  # averaging over ranks waits for one backward pass
                else:
                    continue
            here = score(batch)
            rows_trained += len(batch)
            logp[batch] = here.detach().to(torch.float64)
            if not known:
                columns["logp"] = logp
                part = {name: values[batch] for name, values in columns.items()}
                c[batch], part_loss = groups.coefficients(group_ids[batch], part)
                own_loss += part_loss
            weight = c[batch] * (ranks.world if averaging else 1)
            (here * weight.to(here.dtype)).sum().backward()  # type: ignore[no-untyped-call]
    rows_scored = 0 if at_anchor else len(rows)
    return GroupGradient(loss + ranks.sum(own_loss), c, logp, rows_scored, rows_trained)


@dataclass(frozen=True)
class _Groups:
    """The objective over any set of rows that holds its groups whole; a mean over ``len(ids)`` groups."""

    objective: Objective
    ids: Tensor
    tau: float | Tensor | None
    signals: Mapping[str, Tensor]

    def coefficients(self, group_ids: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """``(c, loss)`` of these rows, in their order; zero for no rows."""
        if not len(group_ids):
            nothing = torch.zeros(0, dtype=torch.float64, device=group_ids.device)
            return nothing, nothing.sum()
        logp, mask, index = from_flat(columns["logp"].to(torch.float64), group_ids)
        shape = (mask.shape[0], mask.shape[1])
        tables = {name: to_table(values.detach(), index, shape) for name, values in columns.items()}
        del tables["logp"]
        anchor = tables.pop("anchor_logp")
        which = torch.searchsorted(self.ids, torch.unique(group_ids))
        tau = self.objective.tau if self.tau is None else self.tau
        if isinstance(tau, Tensor) and tau.ndim:
            tau = tau[which]
        of_group = {name: values[which] for name, values in self.signals.items() if name in GROUP_SIGNALS}
        kwargs = {**tables, **of_group}
        c = self.objective.coefficients(logp, anchor, mask=mask, tau=tau, reduction="sum", **kwargs)
        loss = self.objective.loss(logp, anchor, mask=mask, tau=tau, reduction="sum", **kwargs)
        c = torch.where(live_groups(c, tau).unsqueeze(-1), c, 0.0)
        return to_flat(c, index) / len(self.ids), loss.detach() / len(self.ids)


class _Ranks:
    """The ranks that hold parts of the batch: all those of a process group, or this process alone."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        together = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size(process_group) if together else 1
        self.rank = dist.get_rank(process_group) if together else 0

    def gather(self, values: Tensor) -> list[Tensor]:
        """The ``[rows]`` values of every rank; the ranks may hold different numbers of rows."""
        if self.world == 1:
            return [values]
        length = torch.tensor([len(values)], device=values.device)
        lengths = [torch.empty_like(length) for _ in range(self.world)]
        dist.all_gather(lengths, length, group=self.process_group)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=values.dtype, device=values.device)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.process_group)
        return [part[: int(n)] for part, n in zip(parts, lengths, strict=True)]

    def sum(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value, group=self.process_group)
        return value


def _check_partition(micro_batches: Sequence[Tensor], rows: int) -> None:
    listed = torch.cat(list(micro_batches)).sort().values.tolist() if micro_batches else []
    if listed != list(range(rows)):
        raise ValueError(
            f"micro_batches must name each of the {rows} rows once; got {len(listed)} row indices"
            + (f", the first out of place at {_first_gap(listed)}" if listed else "")
        )


def _first_gap(listed: list[int]) -> int:
    return next((i for i, row in enumerate(listed) if row != i), len(listed))
