"""Attention over packed sequences, in several forms that give the same numbers.

Each takes queries ``[tokens, heads, width]``, keys and values ``[gathered keys, fewer heads, width]``, the plan of
who attends to whom and the scale, and gives ``[tokens, heads, width]``:

- ``varlen``: torch's variable-length attention, on GPUs in bfloat16 or float16;
- ``flash``: the FlashAttention package, where it is installed (4, 3 or 2), on the same;
- ``flex``: torch's FlexAttention, on GPUs in any precision (on a CPU without gradients);
- ``stretches``: one stretch after the other, exact and slow, everywhere.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from adpo.scoring.packed.packing import Plan

Kernel = Callable[[Tensor, Tensor, Tensor, Plan, float | None], Tensor]
NAMES = ("varlen", "flash", "flex", "stretches")
FLASH_PACKAGES = ("flash_attn.cute", "flash_attn_interface", "flash_attn")
"""Newest first: FlashAttention 4, 3 and 2 have the same function under these names."""
ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Earlier forms of torch's function take fewer heads of keys without being told."""
OLDEST = (8, 0)
"""Generation of GPUs that has these kernels: Ampere."""
WIDEST = 256
"""Head that the kernels of variable-length attention take."""
NARROWEST = 16
"""Head that FlexAttention takes."""
BLOCK = 128
"""Tokens that FlexAttention takes at a time."""
FLEX_OPTIONS = {"BACKEND": "TRITON"}
"""One kernel for all sizes: that for decoding, which fewer than 128 queries would get, fails for some of them."""


def takes_varlen(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether torch's variable-length attention has a kernel for heads of this width."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or width % 8 or width > WIDEST:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST


def kernel_for(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """The fastest that is always there."""
    if takes_varlen(device, dtype, width):
        return "varlen"
    return "flex" if why_not("flex", device, dtype, width) is None else "stretches"


def why_not(name: str, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """What keeps this kernel from being used, if anything does."""
    if name in ("varlen", "flash") and not takes_varlen(device, dtype, width):
        return f"it takes bfloat16 or float16 on a GPU and heads of up to {WIDEST}, a multiple of 8"
    if name == "flex" and (device.type != "cuda" or not importlib.util.find_spec("triton")):
        return "it has a backward pass only on a GPU with triton"
    if name == "flex" and width < NARROWEST:
        return f"it takes heads of at least {NARROWEST}"
    if name == "flash" and flash_package() is None:
        return "no FlashAttention package is installed"
    return None


def flash_package() -> str | None:
    """Name of the newest that is installed."""
    for name in FLASH_PACKAGES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:  # of the package around it
            continue
    return None


def prepared(plan: Plan, kernel: str) -> Plan:
    """For this kernel; what FlexAttention needs is made once for all layers."""
    return replace(plan, kernel=kernel, blocks=blocks_of(plan) if kernel == "flex" else None)


def varlen(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scaling: float | None) -> Tensor:
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


@functools.lru_cache(maxsize=1)
def _flash_function() -> Callable[..., Any]:
    package = flash_package()
    if package is None:
        raise ValueError("attention flash: no FlashAttention package is installed (pip install flash-attn-4)")
    function: Callable[..., Any] = importlib.import_module(package).flash_attn_varlen_func
    return function


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flash(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scaling: float | None) -> Tensor:
    found = _flash_function()(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens_q=plan.query_starts,
        cu_seqlens_k=plan.key_starts,
        max_seqlen_q=plan.longest_query,
        max_seqlen_k=plan.longest_key,
        softmax_scale=scaling,
        causal=True,
    )
    out: Tensor = found[0] if isinstance(found, tuple) else found  # newer ones give more
    return out


class Blocks(NamedTuple):
    """For FlexAttention: who attends to whom, block by block, seen from both sides, and the keys of each query."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor
    first: Tensor  # [queries]
    last: Tensor  # [queries]

    def mask(self, queries: int, keys: int) -> BlockMask:
        """Made in the graph, where the size of a block is a constant: the compiler takes no other."""
        first, last = self.first, self.last

        def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key <= last[query])

        return BlockMask((queries, keys), *self[:8], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=seen)


def blocks_of(plan: Plan) -> Blocks:
    """Queries of a block attend to an interval: from the first key of its first query to the last of its last.

    Blocks inside one stretch, and wholly before the diagonal, need no look at single pairs.
    """
    first, last = _intervals_of_keys(plan)
    queries, keys = len(first), int(plan.key_starts[-1])
    begins = torch.arange(0, queries, BLOCK, device=first.device)
    ends = (begins + BLOCK).clamp(max=queries) - 1
    of_keys = torch.arange(0, keys, BLOCK, device=first.device)
    needed = (of_keys + BLOCK > first[begins, None]) & (of_keys <= last[ends, None])
    one_stretch = (first[begins] == first[ends])[:, None]
    full = one_stretch & (of_keys >= first[begins, None]) & (of_keys + BLOCK - 1 <= last[begins, None])
    partial = needed & ~full
    return Blocks(*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T), first, last)


def _intervals_of_keys(plan: Plan) -> tuple[Tensor, Tensor]:
    """First and last key of every query, ``[tokens]``."""
    stretch = torch.repeat_interleave(plan.query_starts.diff())
    behind = (plan.key_starts[1:] - plan.query_starts[1:])[stretch]  # the last of both are aligned
    return plan.key_starts[stretch], torch.arange(len(stretch), device=stretch.device) + behind


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row, and which: the first entries of a row of all; for one batch and one head."""
    counts = table.sum(1, dtype=torch.int32)
    which = table.to(torch.int8).argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None].contiguous(), which[None, None].contiguous()


def _flex(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scaling: float | None) -> Tensor:
    states = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    mask = blocks.mask(len(q), len(k))
    attend: Callable[..., Tensor] = flex_attention
    fewer = q.shape[1] != k.shape[1]
    found = attend(*states, block_mask=mask, scale=scaling, enable_gqa=fewer, kernel_options=FLEX_OPTIONS)
    return found.squeeze(0).transpose(0, 1)


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Tensor]:
    """Mask and all: a mask that comes from outside has sizes that the compiler may take for variables."""
    made: Callable[..., Tensor] = torch.compile(_flex)
    return made


def flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scaling: float | None) -> Tensor:
    inside = torch.compiler.is_compiling() or q.device.type == "cpu"
    return (_flex if inside else _compiled_flex())(q, k, v, plan.blocks, scaling)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def stretches(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scaling: float | None) -> Tensor:
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


KERNELS: dict[str, Kernel] = {"varlen": varlen, "flash": flash, "flex": flex, "stretches": stretches}
