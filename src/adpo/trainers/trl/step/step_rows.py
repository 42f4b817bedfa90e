"""The rows of an optimizer step, in TRL's layout, as the group step takes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from adpo.scoring.passes import whole_groups
from adpo.trainers.group_step import ByIndex, StepRows
from adpo.trainers.trl.step.rows import Rows, trimmed
from adpo.trainers.trl.step.scoring import RowScorer


def step_rows(
    scorer: RowScorer, model: nn.Module, rows: Rows, places: Tensor, *, groups: int, rows_per_pass: int
) -> StepRows:
    """The members at ``places``; ``groups`` are those with a member, in all processes.

    A pass takes so many tokens where rows are packed, else ``rows_per_pass`` of them.
    """
    members = {name: values[places] for name, values in rows.items()}
    parts, tokens = _parts(scorer, members, rows_per_pass)

    def take(chosen: Tensor) -> Rows:
        """A process without a member has to go through the model too, once: with its first row."""
        where = places[chosen] if len(chosen) else places.new_zeros(1)
        return trimmed({name: values[where] for name, values in rows.items()})

    by_index = ByIndex(
        lambda chosen: scorer.logp(model, take(chosen)),
        (lambda chosen, c: scorer.weighted(model, take(chosen), c)) if scorer.scorer.packs else None,
        tokens,
    )
    nothing = zero_through(scorer, model, rows)
    return StepRows(members["groups"], members["rewards"], members["best"], groups, by_index, parts, nothing)


def zero_through(scorer: RowScorer, model: nn.Module, rows: Rows) -> Callable[[], Tensor]:
    """Zero, as a result of the model: for a pass that is due where there is nothing to learn."""
    first = {name: values[:1] for name, values in rows.items()}
    return lambda: 0 * scorer.logp(model, first).sum()


def _parts(
    scorer: RowScorer, rows: Rows, rows_per_pass: int
) -> tuple[Callable[[], list[Tensor]], Callable[[Tensor], int]]:
    """The rows of every pass, and the tokens that some rows take."""
    if scorer.scorer.packs:
        sizes, device = scorer.sizes(rows), rows["groups"].device
        return lambda: sizes.passes(scorer.scorer.budget.tokens, device), sizes.tokens
    order = torch.sort(rows["groups"], stable=True)
    numbers = torch.unique_consecutive(order.values, return_inverse=True)[1]
    parts = [order.indices[part] for part in whole_groups(numbers, rows_per_pass)]
    width = rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
    return lambda: parts, lambda chosen: len(chosen) * width
