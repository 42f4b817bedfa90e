"""Log-probabilities of responses under a causal language model.

Sequences are padded on the right and attention is causal, so no real token ever sees a pad and no attention mask
is needed. Logits are made for the response's tokens alone, in float32, a few thousand at a time, and made again in
the backward pass instead of kept. On CUDA the model itself runs in bfloat16 autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from adpo.experiments.listwise.corpus import Tokens

HEAD_CHUNK = 8192
"""Tokens whose logits exist at a time."""


def seq_logp(model: Any, sequences: Sequence[Tokens], micro_batch: int) -> Tensor:
    """``[len(sequences)]``, float32: the sum over the response's tokens, in passes of similar lengths."""
    parts, order = [], []
    for batch in micro_batches([len(sequence.ids) for sequence in sequences], micro_batch):
        parts.append(_sums(model, [sequences[i] for i in batch]))
        order += batch
    place = torch.empty(len(order), dtype=torch.long)
    place[torch.tensor(order)] = torch.arange(len(order))
    return torch.cat(parts)[place.to(parts[0].device)]


def micro_batches(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices, longest first, so many at a time that the padded batch holds at most ``limit`` tokens (or one row).

    >>> micro_batches([3, 9, 4, 8], 18)
    [[1, 3], [2, 0]]
    """
    batches: list[list[int]] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * width > limit:
            batches.append([])
            width = lengths[i]
        batches[-1].append(i)
    return batches


def _sums(model: Any, sequences: Sequence[Tokens]) -> Tensor:
    device = next(model.parameters()).device
    width = max(len(sequence.ids) for sequence in sequences)
    ids = torch.tensor([sequence.ids + [0] * (width - len(sequence.ids)) for sequence in sequences], device=device)
    start = torch.tensor([sequence.prompt for sequence in sequences], device=device)
    end = torch.tensor([len(sequence.ids) for sequence in sequences], device=device)
    place = torch.arange(1, width, device=device)
    row, position = ((place >= start.unsqueeze(1)) & (place < end.unsqueeze(1))).nonzero(as_tuple=True)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    # The state at a position predicts the token after it.
    token_logp = _token_logp(model.get_output_embeddings(), hidden[row, position].float(), ids[row, position + 1])
    return torch.zeros(len(sequences), device=device).index_add(0, row, token_logp)


def _token_logp(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    def chunk(states: Tensor, wanted: Tensor) -> Tensor:
        return -F.cross_entropy(head(states), wanted, reduction="none")

    pieces = zip(torch.split(hidden, HEAD_CHUNK), torch.split(targets, HEAD_CHUNK), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([chunk(*piece) for piece in pieces])
    return torch.cat([checkpoint(chunk, *piece, use_reentrant=False) for piece in pieces])


def check_head(model: Any) -> None:
    """Refuse a model whose logits are more than its output layer of its last state (scaled or capped ones)."""
    ids = torch.arange(8, device=next(model.parameters()).device).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        ours = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state)
    if not torch.allclose(logits, ours, rtol=1e-3, atol=1e-3):
        raise ValueError(f"{type(model).__name__} changes its logits after the output layer: not supported here")
