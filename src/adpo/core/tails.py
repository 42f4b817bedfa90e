"""``log sum_{j >= i} exp(u_j)`` along the last dimension, with derivatives of every order.

`torch.logcumsumexp` has the first derivative, and the second in forward mode; backward through its backward takes
the logarithm of gradients, and is NaN where one is exactly zero, as it is inside a tie. Here the backward pass is
a sum that decays, linear in the gradient, whose own derivatives are such sums again. O(K) time and memory.

Under `torch.func` and `torch.compile` the sums double their reach instead, by operations that torch can
differentiate in any way, in O(K log K) time and memory: nested forward mode does not see what the derivative of
an `autograd.Function` depends on, and compiled code has no second backward pass through one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adpo.core.groups import transformed


def log_tail(u: Tensor) -> Tensor:
    """``log sum_{j >= i} exp(u_j)`` for every place i, ``[..., K]``.

    >>> log_tail(torch.zeros(3)).exp().round().tolist()
    [3.0, 2.0, 1.0]
    """
    if transformed():
        return _by_doubling(u)
    tail: Tensor = _LogTail.apply(u)  # type: ignore[no-untyped-call]
    return tail


def _by_doubling(u: Tensor) -> Tensor:
    """After each pass of the loop, place i holds the terms i ... i + reach - 1."""
    tail, reach = u, 1
    while reach < u.shape[-1]:
        # Not logaddexp, whose second derivative overflows where the two are far apart.
        longer = torch.stack([tail[..., :-reach], tail[..., reach:]]).logsumexp(0)
        tail, reach = torch.cat([longer, tail[..., -reach:]], -1), 2 * reach
    return tail


def _decayed(g: Tensor, s: Tensor) -> Tensor:
    """``h_j = sum_{i <= j} g_i exp(s_j - s_i)`` for s that never rises."""
    h: Tensor = _Decayed.apply(g, s)  # type: ignore[no-untyped-call]
    return h


def _decayed_back(g: Tensor, s: Tensor) -> Tensor:
    """Its transpose, ``h_i = sum_{j >= i} g_j exp(s_j - s_i)``."""
    return _decayed(g.flip(-1), -s.flip(-1)).flip(-1)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    return tensors


class _Saving(torch.autograd.Function):
    """Derivatives of both modes are formulas of the inputs and the output."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)


class _LogTail(_Saving):
    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return torch.logcumsumexp(u.flip(-1), -1).flip(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        u, s = _saved(ctx)
        return (u - s).exp() * _decayed(g, s)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        u, s = _saved(ctx)
        return _decayed_back((u - s).exp() * t, s)


class _Decayed(_Saving):
    @staticmethod
    def forward(g: Tensor, s: Tensor) -> Tensor:
        # exp(-s) overflows: positive and negative terms are added up as logarithms.
        signs = torch.stack([g, -g]).clamp(min=0).log()
        sums = (torch.logcumsumexp(signs - s, -1) + s).exp()
        return sums[0] - sums[1]

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor, Tensor]:
        g, s, h = _saved(ctx)
        back = _decayed_back(e, s)
        return back, e * h - g * back

    @staticmethod
    def jvp(ctx: Any, dg: Tensor, ds: Tensor) -> Tensor:
        g, s, h = _saved(ctx)
        return _decayed(dg - g * ds, s) + h * ds
