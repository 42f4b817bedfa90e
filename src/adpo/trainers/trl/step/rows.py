"""A batch as columns, one row per completion, in the layout TRL uses."""

from __future__ import annotations

from torch import Tensor

Rows = dict[str, Tensor]
"""Columns of a batch, one row per completion."""

KEPT = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "rewards",
    "groups",
    "member",
    "best",
    "worst",
)
KEPT_IF_PRESENT = ("tool_mask",)
_PROMPT = ("prompt_ids", "prompt_mask")


def kept(batch: Rows) -> Rows:
    """The columns that training needs."""
    return {name: batch[name] for name in (*KEPT, *KEPT_IF_PRESENT) if batch.get(name) is not None}


def split(rows: Rows, size: int) -> list[Rows]:
    """At most ``size`` rows each, without padding they do not need."""
    count = len(rows["completion_ids"])
    return [
        trimmed({name: values[start : start + size] for name, values in rows.items()})
        for start in range(0, count, size)
    ]


def trimmed(rows: Rows) -> Rows:
    """Without the columns that are padding in every one of these rows."""
    if not len(rows["completion_ids"]):
        return rows
    prompt = int(rows["prompt_mask"].any(0).long().argmax())  # padded on the left
    length = max(1, int(rows["completion_mask"].sum(1).max()))  # padded on the right
    width = rows["completion_ids"].shape[1]

    def cut(name: str, values: Tensor) -> Tensor:
        if name in _PROMPT:
            return values[:, prompt:]
        per_token = values.dim() > 1 and values.shape[1] == width
        return values[:, :length] if per_token else values

    return {name: cut(name, values) for name, values in rows.items()}
