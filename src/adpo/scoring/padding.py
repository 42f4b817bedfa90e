"""Padding on the left, which batches have that are sampled from: whether it changes what a model computes.

Attention masks it out. Learned positions are counted from the first token unless they are given, and a recurrent
state runs through it.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adpo.scoring.packed.packed_scoring import dtype_of_layers, inner_model

ROW = [2, 3, 1, 4, 3, 2]
PADDING = 5
"""Of the trial: tokens of the row, and of padding before it."""
TOLERANCE, TOLERANCE_NARROW = 1e-4, 0.1
"""Mean difference of a log-probability that rounding may make, in float32 and in 16 bits."""


class MovedRight(NamedTuple):
    """Rows with all their padding on the right."""

    input_ids: Tensor  # [rows, length of the longest]
    attention_mask: Tensor
    place: Tensor  # [rows, length before]: where each column is now; that of padding means nothing

    def back(self, values: Tensor) -> Tensor:
        """``values`` of every token, or of every token but the first, in the columns from before."""
        values = nn.functional.pad(values, (self.input_ids.shape[1] - values.shape[1], 0))
        return values.gather(1, self.place.clamp(max=values.shape[1] - 1))


def moved_right(input_ids: Tensor, attention_mask: Tensor) -> MovedRight:
    """The same tokens in the same order, with the padding behind them.

    >>> rows = moved_right(torch.tensor([[0, 0, 7, 8], [5, 6, 0, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 0, 1]]))
    >>> rows.input_ids.tolist(), rows.attention_mask.tolist()
    ([[7, 8, 0], [5, 6, 9]], [[1, 1, 0], [1, 1, 1]])
    >>> rows.back(rows.input_ids).tolist()[1]
    [5, 6, 9, 9]
    """
    longest = int(attention_mask.sum(1).max())
    order = (attention_mask == 0).to(torch.uint8).argsort(dim=1, stable=True)
    place = order.argsort(1)
    kept = order[:, :longest]
    return MovedRight(input_ids.gather(1, kept), attention_mask.gather(1, kept), place)


def counts_padding(model: Any) -> bool:
    """Whether a model without given positions takes padding on the left for tokens: by its modules alone."""
    inner = inner_model(model)
    tables = [module for module in inner.base_model.modules() if isinstance(module, nn.Embedding)]
    return any(table is not inner.get_input_embeddings() for table in tables)


@torch.no_grad()
def off_by_padding(model: Any, precision: torch.dtype | None = None, *, positions: bool = False) -> float:
    """Mean difference that padding on the left makes to log-probabilities; 0.0 where it is rounding.

    With ``positions`` the model is given them, if it takes them, as `generate` of transformers does.
    """
    device = next(model.parameters()).device
    alone = torch.tensor([ROW], device=device)
    padded = torch.tensor([[0] * PADDING + ROW], device=device)
    mask = (torch.arange(PADDING + len(ROW), device=device) >= PADDING).long().unsqueeze(0)
    options: dict[str, Tensor] = {}
    if positions and "position_ids" in inspect.signature(inner_model(model).forward).parameters:
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, precision, enabled=precision is not None):
            expected = model(input_ids=alone, attention_mask=torch.ones_like(alone), use_cache=False).logits
            found = model(input_ids=padded, attention_mask=mask, use_cache=False, **options).logits
    finally:
        model.train(was_training)
    pair = (logits[0, -len(ROW) :].float().log_softmax(1) for logits in (found, expected))
    off = float((next(pair) - next(pair)).abs().mean())
    narrow = (precision or dtype_of_layers(model)) != torch.float32
    return off if off > (TOLERANCE_NARROW if narrow else TOLERANCE) else 0.0  # NaN weights say nothing of padding
