"""Attention over packed sequences, for the models of transformers.

Their attention functions are registered by name, and what a model is called with reaches them. Importing this
module teaches the one named ``sdpa`` the word ``plan``: with it, sequences are packed; without it, it is what it
was. (A name of its own would have to be put in the model's configuration and taken out again, and the passes that
gradient checkpointing makes anew come later.)

On a GPU packed attention is torch's variable-length attention; elsewhere stretch by stretch, exact and slow.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adpo.lm.packing import Plan

_plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Earlier forms of torch's function take fewer heads of keys without being told."""
OLDEST = (8, 0)
"""Generation of GPUs that has these kernels: Ampere."""
WIDEST = 256
"""Head that the kernels of variable-length attention take."""


def attention(module: Any, *states: Any, plan: Plan | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it: queries, keys, values, mask."""
    if plan is None:
        found: tuple[Tensor, Tensor | None] = _plain(module, *states, **options)
        return found
    return packed_attention(module, *states[:3], plan=plan, **options), None


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
    attend = _varlen if takes_varlen(q.device, q.dtype, q.shape[-1]) else _stretch_by_stretch
    return attend(q, k, v, plan, scaling).unsqueeze(0)


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


def takes_varlen(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether torch's variable-length attention has a kernel for heads of this width."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or width % 8 or width > WIDEST:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST


def _varlen(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scaling: float | None) -> Tensor:
    fewer: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and ASKS_FOR_GROUPS else {}
    found = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        plan.query_starts,
        plan.key_starts,
        plan.longest_query,
        plan.longest_key,
        scale=scaling,
        window_size=(-1, 0),
        **fewer,
    )
    assert isinstance(found, Tensor)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _stretch_by_stretch(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scaling: float | None) -> Tensor:
    found = []
    queries, keys = plan.query_starts.tolist(), plan.key_starts.tolist()
    for i in range(len(queries) - 1):
        mine, seen = q[queries[i] : queries[i + 1]], slice(keys[i], keys[i + 1])
        count, total = len(mine), keys[i + 1] - keys[i]
        mask = torch.ones(count, total, dtype=torch.bool, device=q.device).tril(total - count)
        mine, theirs, values = (part.transpose(0, 1).unsqueeze(0) for part in (mine, k[seen], v[seen]))
        fewer = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(mine, theirs, values, mask, scale=scaling, enable_gqa=fewer)
        found.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(found)


AttentionInterface.register("sdpa", attention)
