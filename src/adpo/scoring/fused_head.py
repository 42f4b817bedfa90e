"""Token log-probabilities from hidden states, without the table of logits.

    logp = fused_token_logp(hidden, head.weight, targets)                          # [tokens]
    logp, entropy = fused_token_scores(hidden, head.weight, targets)               # [tokens] each
    total, logp = weighted_token_logp(hidden, head.weight, targets, coefficients)  # sum c * logp, [tokens]

The output layer of a language model is as wide as its vocabulary: logits of a few thousand tokens are gigabytes.
Here they are made for some tokens at a time, reduced to a few numbers each, and made again in the backward pass.
Any gradient may come in from above: coefficients of a group, of a token, or none.

Where the coefficients are known before the pass, as those of a group loss are, the gradient is made while the
logits are there: they are not made a second time. That saves one in four of the products.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**29}
"""Logits that exist at a time."""
EVEN = 1024
"""Tokens of a chunk are a multiple of this, where there are so many: matrix products like even shapes."""


class TokenScores(NamedTuple):
    """Of every target: its log-probability, and the entropy of the distribution it is drawn from."""

    logp: Tensor
    entropy: Tensor | None


def token_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, temperature: float = 1.0
) -> TokenScores:
    """The plain form: all logits at once; ``[tokens, width]`` to ``[tokens]``."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    logp = logits.log_softmax(1)
    chosen = logp.gather(1, targets.unsqueeze(1)).squeeze(1)
    return TokenScores(chosen, -(logp.exp() * logp).sum(1))


def fused_token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    *,
    entropy: bool = True,
    chunk: int | None = None,
    precision: torch.dtype | None = None,
) -> TokenScores:
    """As `token_scores`, ``chunk`` tokens at a time in ``precision``; float32, differentiable in both."""
    given = (hidden, weight, targets, bias, temperature, entropy, chunk, precision)
    return TokenScores(*_Scores.apply(*given))  # type: ignore[no-untyped-call]


def fused_token_logp(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
) -> Tensor:
    """The log-probabilities alone."""
    return fused_token_scores(hidden, weight, targets, bias, temperature, entropy=False, chunk=chunk).logp


def weighted_token_logp(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``sum coefficients * logp``, to be differentiated, and the log-probabilities, for the record."""
    given = (hidden, weight, targets, bias, temperature, coefficients, chunk, precision)
    return _Weighted.apply(*given)  # type: ignore[no-any-return,no-untyped-call]


class _Scores(torch.autograd.Function):
    """Keeps the normaliser of every token; the logits are made again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        with_entropy: bool,
        chunk: int | None,
        precision: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        layer = _Layer(hidden, weight, bias, temperature, chunk, precision)
        logp, normaliser, entropy = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        with layer.precision():
            for part, logits in layer.logits():
                read = _on(hidden.device).read(logits, targets[part], temperature, with_entropy)
                logp[part], normaliser[part] = read[0], read[1]
                if with_entropy:
                    entropy[part] = read[2]
        ctx.save_for_backward(hidden, weight, targets, bias, normaliser, entropy)
        ctx.layer = layer.dtype, temperature, chunk
        return logp, entropy if with_entropy else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor | None, above_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, normaliser, entropy = ctx.saved_tensors
        dtype, temperature, chunk = ctx.layer
        layer = _Layer(hidden, weight, bias, temperature, chunk, dtype)
        gradient = _Gradient(layer, [ctx.needs_input_grad[i] for i in (0, 1, 3)])
        above = torch.zeros_like(normaliser) if above is None else above.float()
        for part, logits in layer.logits():
            more = None if above_entropy is None else above_entropy[part].float()
            slopes = _on(hidden.device).slopes(
                logits, targets[part], temperature, normaliser[part], entropy[part], above[part], more
            )
            gradient.add(part, slopes)
        d_hidden, d_weight, d_bias = gradient.found()
        return d_hidden, d_weight, None, d_bias, None, None, None, None


class _Weighted(torch.autograd.Function):
    """The gradient is made in the forward pass, and scaled by what comes in from above."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        temperature: float,
        coefficients: Tensor,
        chunk: int | None,
        precision: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        layer = _Layer(hidden, weight, bias, temperature, chunk, precision)
        gradient = _Gradient(layer, [ctx.needs_input_grad[i] for i in (0, 1, 3)])
        c = coefficients.float()
        logp = torch.empty(len(hidden), device=hidden.device)
        with layer.precision():
            for part, logits in layer.logits():
                logp[part], slopes = _on(hidden.device).read_and_slopes(
                    logits, targets[part], temperature, c[part]
                )
                gradient.add(part, slopes)
        ctx.save_for_backward(*gradient.found())
        ctx.mark_non_differentiable(logp)
        return (c * logp).sum(), logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        slopes = (None if slope is None else slope * above.to(slope) for slope in ctx.saved_tensors)
        d_hidden, d_weight, d_bias = slopes
        return d_hidden, d_weight, None, d_bias, None, None, None, None


class _Layer:
    """The output layer, in the precision of the pass."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        chunk: int | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kind = hidden.device.type
        inside = torch.is_autocast_enabled(kind)
        self.dtype = dtype or (torch.get_autocast_dtype(kind) if inside else hidden.dtype)
        self.hidden, self.weight, self.bias, self.temperature = hidden, weight, bias, temperature
        self.narrow = weight.to(self.dtype)
        self.narrow_bias = None if bias is None else bias.to(self.dtype)
        most = CHUNK_ELEMENTS.get(kind, CHUNK_ELEMENTS["cpu"])
        fits = max(1, most // weight.shape[0])
        self.chunk = chunk or fits // EVEN * EVEN or fits

    def precision(self) -> AbstractContextManager[Any]:
        """What is computed here is cast by hand."""
        return torch.autocast(self.hidden.device.type, enabled=False)

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """A chunk of tokens at a time."""
        for start in range(0, len(self.hidden), self.chunk):
            part = slice(start, start + self.chunk)
            states = self.hidden[part].to(self.dtype)
            yield part, torch.nn.functional.linear(states, self.narrow, self.narrow_bias)


class _Gradient:
    """Of hidden states, weight and bias: those that are wanted, summed in float32."""

    def __init__(self, layer: _Layer, wanted: list[bool]) -> None:
        self.layer = layer
        hidden, weight, bias = layer.hidden, layer.weight, layer.bias
        self.d_hidden = torch.empty_like(hidden) if wanted[0] else None
        self.d_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self.d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None

    def add(self, part: slice, slopes: Tensor) -> None:
        """``slopes`` are those of the logits of these tokens."""
        if self.d_hidden is not None:
            self.d_hidden[part] = (slopes @ self.layer.narrow).to(self.d_hidden.dtype)
        if self.d_weight is not None:
            _add_product(self.d_weight, slopes.T, self.layer.hidden[part].to(slopes.dtype))
        if self.d_bias is not None:
            self.d_bias += slopes.sum(0, dtype=torch.float32)

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        d_weight = None if self.d_weight is None else self.d_weight.to(self.layer.weight.dtype)
        bias = self.layer.bias
        d_bias = None if self.d_bias is None or bias is None else self.d_bias.to(bias.dtype)
        return self.d_hidden, d_weight, d_bias


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` without rounding the product to the precision of its factors."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


# What is done to a chunk of logits; on a GPU by the kernels of `adpo.scoring.fused_head_kernels`.


def _plain_read(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probability of the target, normaliser, entropy."""
    z = logits.float() / temperature
    normaliser = z.logsumexp(1)
    logp = z.gather(1, targets.unsqueeze(1)).squeeze(1) - normaliser
    if not with_entropy:
        return logp, normaliser, None
    return logp, normaliser, normaliser - ((z - normaliser.unsqueeze(1)).exp() * z).sum(1)


def _plain_slopes(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    above: Tensor,
    above_entropy: Tensor | None,
) -> Tensor:
    """``dlogp/dz = onehot(target) - p`` and ``dentropy/dz = -p * (log p + entropy)``, weighted, by the logits."""
    logp = logits.float() / temperature - normaliser.unsqueeze(1)
    p = logp.exp()
    places = torch.arange(logits.shape[1], device=logits.device)
    slope = above.unsqueeze(1) * ((places == targets.unsqueeze(1)).float() - p)
    if above_entropy is not None:
        slope = slope - above_entropy.unsqueeze(1) * p * (logp + entropy.unsqueeze(1))
    return (slope / temperature).to(logits.dtype)


def _plain_read_and_slopes(
    logits: Tensor, targets: Tensor, temperature: float, c: Tensor
) -> tuple[Tensor, Tensor]:
    logp, normaliser, _ = _plain_read(logits, targets, temperature, False)
    return logp, _plain_slopes(logits, targets, temperature, normaliser, normaliser, c, None)


class _Work(NamedTuple):
    read: Callable[..., Any] = _plain_read
    slopes: Callable[..., Any] = _plain_slopes
    read_and_slopes: Callable[..., Any] = _plain_read_and_slopes


@cache
def _kernels() -> _Work:
    from adpo.scoring import fused_head_kernels as head_kernels

    return _Work(head_kernels.read, head_kernels.slopes, head_kernels.read_and_slopes)


def _on(device: torch.device) -> _Work:
    return _kernels() if device.type == "cuda" and importlib.util.find_spec("triton") else _Work()
