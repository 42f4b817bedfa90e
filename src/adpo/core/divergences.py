"""Divergences D(q, p) between a target and the anchored policy, one number per group.

Each formula takes ``log_q`` and ``log_p`` (``[groups, K]``, float64), the ``support`` over which p is
normalised, and ``positions`` of the candidates on the line (used by transport alone). Outside the support
``log_p`` is 0; inside it ``log_q`` may be -inf where the target has no mass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

Formula = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, repr=False)
class Divergence:
    """A named divergence; make your own from a formula with the signature of `Formula`.

    >>> def total_variation(log_q, log_p, support, positions):
    ...     return torch.where(support, log_q.exp() - log_p.exp(), 0.0).abs().sum(-1) / 2
    >>> q, p = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    >>> Divergence("total_variation", total_variation)(q.log(), p.log(), q > 0, None).item()
    0.25
    """

    name: str
    formula: Formula = field(compare=False)
    finite_at_zeros: bool = True  # does it stay finite where the target has no mass?
    needs_positions: bool = False
    entropies: float | None = None  # n, where it is the cross-entropy less n times the entropy of q

    def __call__(self, log_q: Tensor, log_p: Tensor, support: Tensor, positions: Tensor | None) -> Tensor:
        return self.formula(log_q, log_p, support, positions)

    def __repr__(self) -> str:
        return self.name


def _number(value: float) -> str:
    """All digits, so that different orders have different names: 0.5, 2, 0.3333333333333333."""
    return repr(float(value)).removesuffix(".0")


def _mass(log_value: Tensor, support: Tensor) -> Tensor:
    return torch.where(support, log_value.exp(), 0.0)


def entropy(log_q: Tensor, support: Tensor) -> Tensor:
    """``-sum q log q`` over the support, with ``0 log 0 = 0``; ``[groups]``.

    >>> log_q = torch.tensor([[0.5, 0.5, 0.0]]).log()
    >>> entropy(log_q, log_q > -torch.inf).exp().tolist()
    [2.0]
    """
    q = _mass(log_q, support)
    return -(q * torch.where(q > 0, log_q, 0.0)).sum(-1)


def log_softmax(logits: Tensor, support: Tensor) -> Tensor:
    """Log-probabilities over the support, ``[groups, K]``; 0 outside it, and where a group has none.

    >>> log_softmax(torch.zeros(1, 3), torch.tensor([[True, True, False]])).exp().tolist()
    [[0.5, 0.5, 1.0]]
    """
    # A group without support keeps all candidates inside the softmax: no NaN is computed and then hidden.
    inside = support | ~support.any(-1, keepdim=True)
    return torch.where(support, torch.log_softmax(torch.where(inside, logits, -torch.inf), -1), 0.0)


def _cross_entropy(log_q: Tensor, log_p: Tensor, support: Tensor, positions: Tensor | None) -> Tensor:  # noqa: ARG001
    return -(_mass(log_q, support) * log_p).sum(-1)


def _forward_kl(log_q: Tensor, log_p: Tensor, support: Tensor, positions: Tensor | None) -> Tensor:
    return _cross_entropy(log_q, log_p, support, positions) - entropy(log_q, support)


def _reverse_kl(log_q: Tensor, log_p: Tensor, support: Tensor, positions: Tensor | None) -> Tensor:  # noqa: ARG001
    return (_mass(log_p, support) * (log_p - torch.where(support, log_q, 0.0))).sum(-1)


def _alpha(log_q: Tensor, log_p: Tensor, support: Tensor, positions: Tensor | None, *, a: float) -> Tensor:  # noqa: ARG001
    # sum q^a p^(1-a) - 1 as a sum of q^a p^(1-a) - w, with w = q or p, whichever limit is near: where the two are
    # close, expm1 keeps the difference from cancelling; where they are not, logarithms keep it from overflowing.
    has_mass = log_q > -torch.inf
    log_q = torch.where(has_mass, log_q, 0.0)
    log_w = log_q if a >= 0.5 else log_p
    # Where the target has none, nothing that is left out may overflow: 0 times infinity would be the gradient.
    log_product = torch.where(has_mass, a * log_q + (1 - a) * log_p, 0.0)
    share = a - 1 if a >= 0.5 else a
    gap = torch.where(has_mass, share * (log_q - log_p), 0.0)  # log_product - log_w, without its rounding
    near = gap.abs() < 1
    excess = torch.where(
        near, log_w.exp() * torch.expm1(torch.where(near, gap, 0.0)), log_product.exp() - log_w.exp()
    )
    without_mass = torch.zeros_like(log_p) if a >= 0.5 else -log_p.exp()
    return torch.where(support, torch.where(has_mass, excess, without_mass), 0.0).sum(-1) / (a * (a - 1))


def _transport(log_q: Tensor, log_p: Tensor, support: Tensor, positions: Tensor | None, *, order: float) -> Tensor:
    # On a line the best plan couples equal quantiles: integrate |Fq^-1(t) - Fp^-1(t)|^order over t, which is
    # constant between two neighbouring steps of the two distribution functions. Which places meet there follows
    # from how many steps of each function come before: any order of equal steps is an optimal basis of the
    # transport problem, so the slope is a subgradient also where intervals have no width.
    assert positions is not None
    place, by_place = positions.sort(-1)
    mass = torch.stack([_mass(log_q, support), _mass(log_p, support)])
    cdf = mass.gather(-1, by_place.expand_as(mass)).cumsum(-1)[..., :-1]  # the last step of both is at 1
    last = cdf.shape[-1]
    rising = cdf.detach().cummax(-1).values  # a parallel sum may fall by rounding
    order_of_steps = torch.cat([*rising], -1).sort(dim=-1, stable=True).indices
    widths = torch.diff(torch.cat([*cdf], -1).gather(-1, order_of_steps), dim=-1, prepend=place[..., :1] * 0)
    of_q = (order_of_steps < last).long()
    before_q, before_p = (each.cumsum(-1) - each for each in (of_q, 1 - of_q))
    distance = (place.gather(-1, before_q) - place.gather(-1, before_p)).abs()
    return (widths * distance**order).sum(-1)


cross_entropy = Divergence("cross_entropy", _cross_entropy, entropies=0)
"""``-sum q log p``: the paper's loss and the default."""

forward_kl = Divergence("forward_kl", _forward_kl, entropies=1)
"""``KL(q || p)``: cross-entropy less the target's entropy; the same gradient, zero at the optimum."""

reverse_kl = Divergence("reverse_kl", _reverse_kl, finite_at_zeros=False)
"""``KL(p || q)``: mode-seeking; infinite where the target has no mass."""


def alpha(a: float) -> Divergence:
    """``(sum q^a p^(1-a) - 1) / (a (a - 1))``; KL(q || p) at a = 1, KL(p || q) at a = 0.

    For ``a <= 0`` it is infinite against a target with zeros. For ``a > 1`` it grows like
    ``exp((a - 1) |u|)`` and overflows when the anchored logits reach some hundreds.

    >>> alpha(0.5), alpha(1), alpha(0)
    (alpha(0.5), forward_kl, reverse_kl)
    """
    if not math.isfinite(a):
        raise ValueError(f"alpha needs a finite order; got {a}")
    if a == 1:
        return forward_kl
    if a == 0:
        return reverse_kl
    return Divergence(f"alpha({_number(a)})", partial(_alpha, a=a), finite_at_zeros=a > 0)


def wasserstein(order: float = 1.0) -> Divergence:
    """Transport cost ``W_order^order`` between q and p with ground metric ``|x_i - x_j|``.

    ``x`` is the signal ``positions`` where given, else the rewards (or the ranks). The power is left on
    (for order 2: the squared distance), because the root has an infinite slope at the optimum. The cost has a
    kink there, and wherever steps of the two distribution functions meet: one of the subgradients comes back.

    >>> q, places = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    >>> half = torch.tensor([[0.5, 0.5]])
    >>> wasserstein()(q.log(), half.log(), half > 0, places).item()  # half of the mass moves by 3
    1.5
    """
    if not (order >= 1 and math.isfinite(order)):
        raise ValueError(f"wasserstein needs an order of at least 1; got {order}")
    return Divergence(f"wasserstein({_number(order)})", partial(_transport, order=order), needs_positions=True)
