"""What is done to a chunk of logits on a GPU: one program a token, which goes along the vocabulary once or twice.

Slopes are written over the logits they belong to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


def read(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probability of the target, normaliser, entropy."""
    logp, normaliser, entropy = _rows(logits, 3)
    given = (logits, targets, logp, normaliser, entropy, logits.shape[1], 1 / temperature)
    _start(_read, logits, *given, with_entropy)
    return logp, normaliser, entropy if with_entropy else None


def slopes(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    above: Tensor,
    above_entropy: Tensor | None,
) -> Tensor:
    """In the place of the logits."""
    more = above if above_entropy is None else above_entropy
    rows = (normaliser, entropy, above, more)
    given = (logits, targets, *(row.contiguous() for row in rows), logits.shape[1], 1 / temperature)
    _start(_slopes, logits, *given, above_entropy is not None)
    return logits


def read_and_slopes(logits: Tensor, targets: Tensor, temperature: float, c: Tensor) -> tuple[Tensor, Tensor]:
    """Both, for coefficients that are known; slopes in the place of the logits."""
    (logp,) = _rows(logits, 1)
    _start(_read_and_slopes, logits, logits, targets, c.contiguous(), logp, logits.shape[1], 1 / temperature)
    return logp, logits


def _rows(logits: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(len(logits), device=logits.device) for _ in range(count))


def _start(kernel: Any, logits: Tensor, *given: Any) -> None:
    assert logits.is_contiguous()
    kernel[(len(logits),)](*given, BLOCK=BLOCK, num_warps=WARPS)


# Kernels are a language of their own: their arguments have no types.
# ruff: noqa: N803


@triton.jit
def _normaliser(logits, vocabulary, target, scale, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Of one token: log of the sum of exponentials, the target's logit, the mean logit."""
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    chosen = tl.full((), 0.0, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        z = tl.load(logits + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32) * scale
        new = tl.maximum(highest, tl.max(z, 0))
        grown = tl.exp(z - new)
        shrink = tl.exp(highest - new)
        total = total * shrink + tl.sum(grown, 0)
        if WITH_ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(places < vocabulary, grown * z, 0.0), 0)
        chosen += tl.sum(tl.where(places == target, z, 0.0), 0)
        highest = new
    return highest + tl.log(total), chosen, weighted / total


@triton.jit
def _read(
    logits, targets, logp, normaliser, entropy, vocabulary, scale, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    found, chosen, mean = _normaliser(logits + row * vocabulary, vocabulary, target, scale, WITH_ENTROPY, BLOCK)
    tl.store(logp + row, chosen - found)
    tl.store(normaliser + row, found)
    if WITH_ENTROPY:
        tl.store(entropy + row, found - mean)


@triton.jit
def _slopes(
    logits,
    targets,
    normaliser,
    entropy,
    above,
    above_entropy,
    vocabulary,
    scale,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dlogp/dz = onehot(target) - p`` and ``dentropy/dz = -p * (log p + entropy)``, weighted, by the logits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    found = tl.load(normaliser + row)
    c = tl.load(above + row)
    of_row = logits + row * vocabulary
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        logp = tl.load(of_row + places, mask=inside, other=0.0).to(tl.float32) * scale - found
        p = tl.exp(logp)
        slope = c * (tl.where(places == target, 1.0, 0.0) - p)
        if WITH_ENTROPY:
            slope -= tl.load(above_entropy + row) * p * (logp + tl.load(entropy + row))
        tl.store(of_row + places, slope * scale, mask=inside)


@triton.jit
def _read_and_slopes(logits, targets, coefficients, logp, vocabulary, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    c = tl.load(coefficients + row)
    of_row = logits + row * vocabulary
    found, chosen, _ = _normaliser(of_row, vocabulary, target, scale, False, BLOCK)
    tl.store(logp + row, chosen - found)
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        p = tl.exp(tl.load(of_row + places, mask=inside, other=0.0).to(tl.float32) * scale - found)
        slope = c * (tl.where(places == target, 1.0, 0.0) - p) * scale
        tl.store(of_row + places, slope, mask=inside)
