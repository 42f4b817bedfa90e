"""Token log-probabilities from hidden states, without the table of logits.

    logp = fused_token_logp(hidden, head.weight, targets)            # [tokens]

The output layer of a language model is as wide as its vocabulary: logits of a few thousand tokens are gigabytes.
Here they are made for some tokens at a time, reduced to one number each, and made again in the backward pass.
Any gradient may come in from above: coefficients of a group, of a token, or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**27
"""Logits that exist at a time: half a gigabyte in float32."""


def token_logp(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain form: ``log softmax(hidden @ weight.T)`` at the targets; ``[tokens, width]`` to ``[tokens]``."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return chosen - logits.logsumexp(1)


def fused_token_logp(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, chunk: int | None = None
) -> Tensor:
    """As `token_logp`, ``chunk`` tokens at a time; float32."""
    size = chunk or max(1, CHUNK_ELEMENTS // weight.shape[0])
    found: Tensor = _TokenLogp.apply(hidden, weight, targets, bias, size)  # type: ignore[no-untyped-call]
    return found


class _TokenLogp(torch.autograd.Function):
    """``dlogp/dlogits = onehot(target) - softmax``, from the logits made again and the kept normaliser."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk: int
    ) -> Tensor:
        logp = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty_like(logp)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias)
            normaliser[part] = logits.logsumexp(1)
            logp[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - normaliser[part]
        ctx.save_for_backward(hidden, weight, targets, bias, normaliser)
        ctx.chunk = chunk
        return logp

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, bias, normaliser = ctx.saved_tensors
        wants = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wants[0] else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants[3] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            slope = _logits(hidden[part], weight, bias).sub_(normaliser[part].unsqueeze(1)).exp_()
            slope.mul_(-above[0][part].unsqueeze(1))
            slope.scatter_add_(1, targets[part].unsqueeze(1), above[0][part].unsqueeze(1).to(slope))
            narrow = slope.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = narrow @ weight.to(hidden.dtype)
            if d_weight is not None:
                d_weight += (narrow.T @ hidden[part]).float()
            if d_bias is not None:
                d_bias += slope.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None,
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Float32, whatever the precision of the product."""
    cast = None if bias is None else bias.to(hidden.dtype)
    return torch.nn.functional.linear(hidden, weight.to(hidden.dtype), cast).float()
