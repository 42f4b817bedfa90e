"""Trust region policy optimization (Schulman et al. 2015), for small networks.

    maximise the surrogate subject to KL(pi_old || pi) <= max_kl:
    step = sqrt(2 max_kl / (x^T F x)) x,   F x = gradient, F = Hessian of the KL at pi_old

F x = g is solved by conjugate gradient from Fisher-vector products (two backward passes each, linear in the number
of parameters); a backtracking line search then enforces improvement and the constraint.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class TrustRegionStep(NamedTuple):
    """How a step ended."""

    accepted: bool
    improvement: float
    kl: float
    backtracks: int


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, iterations: int = 10, tolerance: float = 1e-10
) -> Tensor:
    """x with ``product(x) = b`` for a symmetric positive-definite ``product``; ``tolerance`` is relative to b."""
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    squared = residual.dot(residual)
    enough = tolerance * squared
    for _ in range(iterations):
        if squared <= enough:
            break
        applied = product(direction)
        length = squared / direction.dot(applied)
        x = x + length * direction
        residual = residual - length * applied
        new_squared = residual.dot(residual)
        direction = residual + (new_squared / squared) * direction
        squared = new_squared
    return x


def trpo_step(
    parameters: Iterable[Tensor],
    surrogate: Callable[[], Tensor],
    kl: Callable[[], Tensor],
    *,
    max_kl: float = 0.01,
    iterations: int = 10,
    damping: float = 0.1,
    backtracks: int = 10,
    shrink: float = 0.5,
) -> TrustRegionStep:
    """Move ``parameters`` in place; those that are frozen or that neither function uses stay where they are.

    ``surrogate()`` is to be maximised, ``kl()`` is the mean KL(pi_old || pi). Both are evaluated anew at the
    current parameters; the old policy inside them must be a constant.
    """
    params = [parameter for parameter in parameters if parameter.requires_grad]
    value = surrogate()
    # What a loss does not use has a gradient of zero, and stays where it is.
    gradient = _flat(torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True)).detach()
    kl_gradient = _flat(
        torch.autograd.grad(kl(), params, create_graph=True, allow_unused=True, materialize_grads=True)
    )

    def fisher(vector: Tensor) -> Tensor:
        product = torch.autograd.grad(
            kl_gradient.dot(vector), params, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return _flat(product).detach() + damping * vector

    direction = conjugate_gradient(fisher, gradient, iterations)
    curvature = direction.dot(fisher(direction))
    if not bool(curvature > 0):  # no gradient, nothing to do
        return TrustRegionStep(False, 0.0, 0.0, 0)
    step = (2 * max_kl / curvature).sqrt() * direction
    start = parameters_to_vector(params).detach().clone()
    with torch.no_grad():
        for count in range(backtracks + 1):
            vector_to_parameters(start + shrink**count * step, params)
            improvement, distance = float(surrogate() - value.detach()), float(kl())
            if improvement > 0 and distance <= max_kl:
                return TrustRegionStep(True, improvement, distance, count)
        vector_to_parameters(start, params)
    return TrustRegionStep(False, 0.0, 0.0, backtracks)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
