"""Group gradients that are exact over micro-batches, shuffles and ranks.

The loss couples the members of a group, but only through a table of scalars. `backward` fills the table
without gradient, differentiates it, and back-propagates ``sum c * logp`` one micro-batch at a time: the gradient
is that of the whole-group loss, whichever rows share a micro-batch or a rank. Only ``[rows]`` scalars travel
between ranks.

Passes that the table does not need are not made: no scoring when the anchor is the policy itself (u = 0) nor
for a micro-batch that holds its groups whole, and no pass at all for rows of a group without gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor

from adpo.core.objective import Diagnostics, Objective
from adpo.core.signals import Signals
from adpo.rows import RowGroups
from adpo.system.ranks import Ranks

ScoreRows = Callable[[Tensor], Tensor]
"""Log-probabilities ``[len(rows)]`` of the rows with these indices; differentiable, and the same each time."""
WeighRows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``sum weight * logp`` over the rows with these indices, to be differentiated, and their log-probabilities."""


@dataclass(frozen=True)
class Parallel:
    """How this process works together with others, and what owns its backward passes.

    ``averaging=True`` undoes the division by the number of ranks that `DistributedDataParallel` makes; give it
    that module's ``no_sync`` as well, to communicate once, in the last micro-batch. ``lockstep=True`` is for
    sharded parameters, where every pass is a matter of all ranks: each makes as many, with its first row where it
    has nothing to do. What owns a gradient scaler or an engine of its own gives ``back_propagate``.
    """

    process_group: dist.ProcessGroup | None = None  # None: all processes of the training, or this one alone
    averaging: bool = False
    lockstep: bool = False
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
    back_propagate: Callable[[Tensor], object] = lambda loss: loss.backward()  # type: ignore[no-untyped-call]

    def __post_init__(self) -> None:
        """Refuse what would hang or silently scale the gradient under `DistributedDataParallel`."""
        module = getattr(self.no_sync, "__self__", None)
        if module is None:
            return
        if not self.averaging:
            raise ValueError(
                "no_sync was given without averaging=True: the wrapper divides gradients by the ranks"
            )
        if getattr(module, "broadcast_buffers", False) and any(True for _ in module.buffers()):
            raise ValueError(
                "the wrapper broadcasts buffers in every forward pass, and ranks make different numbers of them: "
                "build DistributedDataParallel with broadcast_buffers=False"
            )


ALONE = Parallel()


class GroupGradient(NamedTuple):
    """What `backward` did; ``rows`` are this rank's, loss and diagnostics are over the groups of all ranks."""

    loss: Tensor
    diagnostics: Diagnostics
    coefficients: Tensor  # [rows], float64, dloss/dlogp
    logp: Tensor  # [rows], float64, before the step; NaN for rows that no pass had to see
    rows_scored: int  # rows that went through a forward pass without gradient
    rows_trained: int  # rows that went through forward and backward


def backward(
    objective: Objective,
    score: ScoreRows,
    micro_batches: Sequence[Tensor],
    group_ids: Tensor,
    anchor_logp: Tensor | None = None,
    *,
    at_anchor: bool = False,
    tau: float | Tensor | None = None,
    extra: Tensor | None = None,
    weigh: WeighRows | None = None,
    parallel: Parallel = ALONE,
    **signals: Unpack[Signals],
) -> GroupGradient:
    """Accumulate the gradient of ``objective``, a (weighted) mean over groups, in the parameters behind ``score``.

    ``micro_batches`` is a partition of this rank's rows, in any order; ``group_ids`` (``[rows]``, one id per
    group over all ranks), ``anchor_logp`` (None is the zero anchor) and the signals are flat. A tensor ``tau`` and
    the signals that belong to a group (`labels`, `preference`, `weights`) are ``[groups]``, in ascending order of
    the ids of all ranks; candidates count in the order of ranks, then rows. ``extra``, ``[rows]``, is added to the
    coefficients: the part of a loss that looks at rows one by one, such as a likelihood term. ``weigh`` takes the
    place of ``score`` where the coefficients are known before the pass, if that makes it cheaper.

    ``at_anchor=True`` says that the policy is the anchor; ``anchor_logp`` may then be None (unless the target
    looks at it). ``parallel`` says how several processes work together.

    Everything is validated before the first pass, and what is wrong on one rank is raised on all. Without a single
    row the loss is 0.
    """

    parallel, signals = _with_old_names(parallel, signals)

    def check() -> object:
        _check_partition(micro_batches, len(group_ids))
        if at_anchor and anchor_logp is None and objective.target.reads_anchor:
            raise ValueError(f"{objective.target} looks at the anchor: pass anchor_logp, at u = 0 too")
        if extra is not None and not (extra.shape == group_ids.shape and bool(torch.isfinite(extra).all())):
            raise ValueError(f"extra must be finite and [rows] = {list(group_ids.shape)}; got {list(extra.shape)}")
        return f"at_anchor={at_anchor}, averaging={parallel.averaging}, lockstep={parallel.lockstep}"

    ranks = Ranks(parallel.process_group)
    groups = RowGroups.of(objective, group_ids, anchor_logp, tau, signals, ranks, check)
    # `labels` count rows in their order. A rank without rows still takes part in the last backward pass.
    batches = [batch.sort().values for batch in micro_batches] or [group_ids.new_zeros(0, dtype=torch.long)]
    lockstep = parallel.lockstep and ranks.world > 1
    scale = ranks.world if parallel.averaging else 1
    if lockstep:
        most = int(torch.cat(ranks.gather(group_ids.new_tensor([len(batches)]))).max())
        batches += [batches[0][:0]] * (most - len(batches))
    more = torch.zeros_like(groups.anchor) if extra is None else extra.to(groups.anchor)
    apart = [batch for batch in batches if at_anchor or lockstep or not groups.whole(batch)]
    rows = torch.cat([*apart, batches[0][:0]]).sort().values

    logp = torch.full_like(groups.anchor, torch.nan)
    if not at_anchor:
        with torch.no_grad():
            scored = [(batch, score(batch if len(batch) else batches[0][:1])) for batch in apart]

        def fill() -> None:
            for batch, here in scored:
                if len(batch):
                    logp[batch] = groups.checked(_wide(here), batch)

        ranks.together(fill, logp.device)
    # Groups that are spread out: one table over all ranks, the same on each of them.
    c, computed = torch.zeros_like(logp), torch.zeros_like(logp, dtype=torch.bool)
    c[rows] = groups.coefficients(rows, groups.anchor if at_anchor else logp, ranks) + more[rows]
    computed[rows] = True

    rows_trained = 0
    unchecked: list[tuple[Tensor, Tensor]] = []  # rows and log-probabilities that nothing below waits for
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        settled = bool(computed[batch].all())
        live = batch[c[batch] != 0] if settled else batch
        if not len(live) and not (lockstep or (last and ranks.world > 1)):
            continue
        with nullcontext() if last else parallel.no_sync():
            weight = c[live] * scale
            if settled and weigh is not None and len(live):
                product, here = weigh(live, weight)
                unchecked.append((live, here))
            else:
                here = score(live if len(live) else batches[0][:1])  # other ranks wait for this backward pass
                if len(live):
                    logp[live] = groups.checked(_wide(here), live)
                if not settled:
                    c[live] = groups.coefficients(live, logp) + more[live]
                    weight = c[live] * scale
                product = (here.to(weight) * weight if len(live) else 0 * here).sum()
            rows_trained += len(here)
            parallel.back_propagate(product)
    for live, here in unchecked:
        logp[live] = groups.checked(here, live)
    loss, diagnostics = groups.summary(groups.anchor if at_anchor else logp, ranks)
    return GroupGradient(loss, diagnostics, c, logp, 0 if at_anchor else len(rows), rows_trained)


class RowCoefficients(NamedTuple):
    """``rows`` are this rank's, loss and diagnostics are over the groups of all ranks."""

    loss: Tensor
    diagnostics: Diagnostics
    coefficients: Tensor  # [rows], float64, dloss/dlogp; exactly zero in a group without gradient


def coefficients(
    objective: Objective,
    logp: Tensor,
    group_ids: Tensor,
    anchor_logp: Tensor | None,
    *,
    tau: float | Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    **signals: Unpack[Signals],
) -> RowCoefficients:
    """What `backward` multiplies log-probabilities with, for trainers that own their backward pass.

    Everything is flat, ``[rows]``, as for `backward`; the mean is over the groups of all ranks. Back-propagating
    ``sum c * logp`` over all rows, in any pieces, gives the gradient of the whole-group loss.

    >>> import adpo
    >>> zero = torch.zeros(4)
    >>> ids, rewards = torch.tensor([1, 0, 1, 0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    >>> objective = adpo.presets.anchored_top1()
    >>> adpo.exact.coefficients(objective, zero, ids, zero, rewards=rewards).coefficients.tolist()
    [-0.25, 0.0, 0.25, 0.0]
    """
    ranks = Ranks(process_group)
    groups = RowGroups.of(objective, group_ids, anchor_logp, tau, signals, ranks)
    rows = torch.arange(len(group_ids), device=group_ids.device)
    values = torch.empty_like(groups.anchor)

    def fill() -> None:
        values[rows] = groups.checked(logp, rows)

    ranks.together(fill, values.device)
    loss, diagnostics = groups.summary(values, ranks)
    return RowCoefficients(loss, diagnostics, groups.all_coefficients(values, ranks))


def _wide(scored: Tensor) -> Tensor:
    if scored.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"score returned {str(scored.dtype).removeprefix('torch.')} log-probabilities: their coefficients "
            "would be rounded, and no longer sum to zero in a group; take the log-softmax of logits.float()"
        )
    return scored


def _check_partition(micro_batches: Sequence[Tensor], rows: int) -> None:
    listed = torch.cat(list(micro_batches)).sort().values.tolist() if micro_batches else []
    if listed != list(range(rows)):
        raise ValueError(
            f"micro_batches must name each of the {rows} rows once; got {len(listed)} row indices"
            + (f" from {listed[0]} to {listed[-1]}" if listed else "")
        )


def _with_old_names(parallel: Parallel, signals: Signals) -> tuple[Parallel, Signals]:
    """``averaging=True`` and the like, once arguments of `backward` themselves."""
    given: dict[str, Any] = {**signals}
    old = {field.name: given.pop(field.name) for field in fields(Parallel) if field.name in given}
    if not old:
        return parallel, signals
    names = ", ".join(f"{name}=..." for name in old)
    warnings.warn(f"give parallel=exact.Parallel({names}) instead of {names}", DeprecationWarning, stacklevel=3)
    return replace(parallel, **old), cast(Signals, given)
