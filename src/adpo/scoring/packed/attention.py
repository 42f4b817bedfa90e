"""Attention over packed sequences, for the models of transformers.

Their attention functions are registered by name, and what a model is called with reaches them. Importing this
module teaches the one named ``sdpa`` the word ``plan``: with it, sequences are packed; and the word ``one_query``:
with it, every row has one token that attends to a cache. Without them, it is what it was. (A name of its own would
have to be put in the model's configuration and taken out again, and the passes that gradient checkpointing makes
anew come later.)

What computes it is in `adpo.scoring.packed.attention_kernels`, and named in the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adpo.scoring.packed.attention_kernels import KERNELS, takes_varlen
from adpo.scoring.packed.packing import Plan

_plain = ALL_ATTENTION_FUNCTIONS["sdpa"]


def attention(
    module: Any, *states: Any, plan: Plan | None = None, one_query: bool = False, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: queries, keys, values, mask."""
    if one_query:
        query, key, value, mask = states
        return one_query_attention(query, key, value, mask, options.get("scaling")), None
    if plan is None:
        found: tuple[Tensor, Tensor | None] = _plain(module, *states, **options)
        return found
    mask = states[3] if len(states) > 3 else options.pop("attention_mask", None)
    if mask is not None and mask.numel() != 1:  # the plan is in its place, and knows nothing of it
        raise ValueError(f"{type(module).__name__} makes a mask of its own: packed sequences have none")
    return packed_attention(module, *states[:3], plan=plan, **options), None


def one_query_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Heads that share keys become queries of one head: what is cached is not copied for each of them."""
    rows, heads, _, width = query.shape
    together = query.view(rows, key.shape[1], -1, width)
    mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    found = scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(rows, 1, heads, width)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Plan,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """``[1, heads, tokens, width]``, keys and values maybe with fewer heads, to ``[1, tokens, heads, width]``."""
    if sliding_window is not None and sliding_window < plan.longest_key:
        raise ValueError(f"{type(module).__name__} attends through a window: packed sequences do not")
    if dropout:
        raise ValueError(f"{type(module).__name__} has dropout: packed sequences do not")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary embeddings leave queries and keys in float32
        query, key, value = (states.to(torch.get_autocast_dtype(kind)) for states in (query, key, value))
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    if plan.keys is not None:
        k, v = (_Gathered.apply(states, *plan.keys) for states in (k, v))  # type: ignore[no-untyped-call]
    kernel = plan.kernel or ("varlen" if takes_varlen(q.device, q.dtype, q.shape[-1]) else "stretches")
    return KERNELS[kernel](q, k, v, plan, scaling).unsqueeze(0)


class _Gathered(torch.autograd.Function):
    """Rows of a table by their numbers; most of them once: little has to be summed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, tokens: Tensor, *places: Tensor) -> Tensor:
        ctx.save_for_backward(*places)
        return states.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        first, again, again_tokens = ctx.saved_tensors
        once = above.index_select(0, first)
        return once.index_add(0, again_tokens, above.index_select(0, again)), None, None, None, None


AttentionInterface.register("sdpa", attention)
