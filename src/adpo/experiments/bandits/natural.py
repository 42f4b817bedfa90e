"""A natural-gradient step for stacked policies: conjugate gradient, trust region, line search, each run on its
own.

TRPO takes it on the policy-gradient surrogate, ADPO on its own loss (the paper's first limitation: its trust
region lives in distribution space, its optimizer in parameter space).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adpo.experiments.stacked import Weights


@dataclass(frozen=True)
class TrustRegion:
    """How far a step may go: mean KL(old || new) at most ``max_kl``."""

    max_kl: float = 0.01
    iterations: int = 10  # of conjugate gradient
    damping: float = 0.1
    backtracks: int = 8
    shrink: float = 0.5


def natural_step(
    weights: Weights, loss: Callable[[Weights], Tensor], kl: Callable[[Weights], Tensor], region: TrustRegion
) -> None:
    """Move each run's weights in place; ``loss`` and ``kl`` return ``[runs]``.

    A run whose line search finds no improvement inside the region stays where it is.
    """
    live = [weight.detach().requires_grad_() for weight in weights]
    start = loss(live)
    gradient = _flat(torch.autograd.grad(start.sum(), live)).detach()
    kl_gradient = _flat(torch.autograd.grad(kl(live).sum(), live, create_graph=True))

    def fisher(vector: Tensor) -> Tensor:
        product = torch.autograd.grad((kl_gradient * vector).sum(), live, retain_graph=True)
        return _flat(product).detach() + region.damping * vector

    direction = _solve(fisher, gradient, region.iterations)
    curvature = (direction * fisher(direction)).sum(1, keepdim=True)
    length = torch.where(curvature > 0, (2 * region.max_kl / curvature.clamp(min=1e-30)).sqrt(), 0.0)
    step = length * direction
    with torch.no_grad():
        taken = torch.zeros(len(gradient), 1)
        for count in range(region.backtracks + 1):
            share = region.shrink**count
            trial = _moved(weights, -share * step)
            better = (loss(trial) < start.detach()) & (kl(trial) <= region.max_kl)
            taken = torch.where((taken == 0) & better.unsqueeze(1), share, taken)
            if bool((taken > 0).all()):
                break
        for weight, moved in zip(weights, _moved(weights, -taken * step), strict=True):
            weight.copy_(moved)


def _solve(product: Callable[[Tensor], Tensor], b: Tensor, iterations: int) -> Tensor:
    """Conjugate gradient for every row of ``b`` at once."""
    x, residual, direction = torch.zeros_like(b), b, b
    squared = (residual * residual).sum(1, keepdim=True)
    for _ in range(iterations):
        applied = product(direction)
        length = squared / (direction * applied).sum(1, keepdim=True).clamp(min=1e-30)
        x = x + length * direction
        residual = residual - length * applied
        new = (residual * residual).sum(1, keepdim=True)
        direction = residual + new / squared.clamp(min=1e-30) * direction
        squared = new
    return x


def _flat(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], 1)


def _moved(weights: Weights, step: Tensor) -> Weights:
    sizes = [weight[0].numel() for weight in weights]
    pieces = torch.split(step, sizes, 1)
    return [weight.detach() + piece.reshape(weight.shape) for weight, piece in zip(weights, pieces, strict=True)]
