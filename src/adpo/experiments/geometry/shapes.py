"""Curves and surfaces of the equation, as plain lists: every number comes from `adpo.Objective` or a baseline.

Three candidates, a reference that prefers the third, and advantages that prefer the first; where only two matter,
the first against the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adpo.baselines import ppo_clip_loss
from adpo.core import presets
from adpo.core.divergences import cross_entropy, reverse_kl
from adpo.core.objective import Objective
from adpo.core.targets import boltzmann, soft

REFERENCE = (0.2, 0.3, 0.5)
ADVANTAGES = (1.0, 0.0, -1.0)
TAUS = (0.25, 0.5, 1.0, 2.0, 4.0)
BETA = 1.0
CLIP = 0.2


def _row(values: Any) -> Tensor:
    return torch.tensor([list(values)], dtype=torch.float64)


def _listed(values: Tensor) -> Any:
    """Six digits, as lists."""
    return [_listed(each) for each in values] if values.ndim else float(f"{float(values):.6g}")


def reference() -> Tensor:
    return _row(REFERENCE).log()


def target() -> Tensor:
    """``q``, from the advantages."""
    return (_row(ADVANTAGES) / BETA).softmax(-1)


def optimum(tau: float) -> Tensor:
    """``pi_ref q^tau``, normalised."""
    return (reference() + tau * target().log()).softmax(-1)


def paths(tau: float = 1.0, steps: int = 600, rate: float = 0.2) -> dict[str, Any]:
    """Of the policy on the simplex under gradient descent on its logits: SFT on the first candidate, and ADPO."""
    sft, ours = presets.sft(), Objective(boltzmann(BETA), tau=tau)
    slopes: dict[str, Callable[[Tensor], Tensor]] = {
        "SFT": lambda logp: sft.coefficients(logp, None, labels=torch.tensor([0])),
        "ADPO": lambda logp: ours.coefficients(logp, reference(), rewards=_row(ADVANTAGES)),
    }
    found = {}
    for name, slope in slopes.items():
        logits, points = reference().clone(), []
        for _ in range(steps):
            logp = logits.log_softmax(-1)
            points.append(logp.exp()[0])
            c = slope(logp)
            logits = logits - rate * (c - logp.exp() * c.sum())  # the chain rule of log_softmax
        found[name] = _listed(torch.stack(points))
    return {"tau": tau, "reference": list(REFERENCE), "optimum": _listed(optimum(tau)[0]), "paths": found}


def sft_landscape(points: int = 61) -> dict[str, Any]:
    """The loss of SFT over the simplex, ``None`` outside it."""
    axis = torch.linspace(0.01, 0.98, points, dtype=torch.float64)
    first, second = torch.meshgrid(axis, axis, indexing="ij")
    third = 1 - first - second
    inside = third > 0.005
    policy = torch.stack([first, second, third.clamp(min=0.005)], -1)[inside]
    values = presets.sft().loss(
        policy.log(), None, reduction="none", labels=torch.zeros(len(policy), dtype=torch.long)
    )
    table = torch.full_like(first, float("nan"))
    table[inside] = values
    return {"axis": _listed(axis), "loss": [[None if v != v else v for v in row] for row in _listed(table)]}


def bowl(tau: float, reach: float = 4.0, points: int = 61) -> dict[str, Any]:
    """The anchored loss above its minimum, over log-ratios of the first two candidates to the reference.

    The anchor is the origin. The minimum is elsewhere: where ``logp = anchor_logp + tau log q``.
    """
    axis = torch.linspace(-reach, reach, points, dtype=torch.float64)
    first, second = torch.meshgrid(axis, axis, indexing="ij")
    moved = torch.stack([first, second, torch.zeros_like(first)], -1).reshape(-1, 3)
    objective = Objective(boltzmann(BETA), tau=tau)
    anchor = reference().expand(len(moved), 3)
    rewards = _row(ADVANTAGES)
    values = objective.loss(anchor + moved, anchor, reduction="none", rewards=rewards.expand(len(moved), 3))
    log_q = target().log()
    lowest = objective.loss(reference() + tau * log_q, reference(), rewards=rewards)
    minimum = tau * (log_q[0, :2] - log_q[0, 2])
    above = (values - lowest).reshape(points, points)
    return {"tau": tau, "axis": _listed(axis), "loss": _listed(above), "minimum": _listed(minimum)}


def curvature() -> list[dict[str, Any]]:
    """Eigenvalues of the Hessian in log-probabilities at the minimum, and of ``(Diag(q) - q q^T) / tau^2``."""
    q = target()[0]
    found = []
    for tau in TAUS:
        objective = Objective(boltzmann(BETA), tau=tau)

        def loss(logp: Tensor, objective: Objective = objective) -> Tensor:
            return objective.loss(logp[None], reference(), rewards=_row(ADVANTAGES))

        hessian = torch.func.hessian(loss)(reference()[0] + tau * q.log())
        expected = (torch.diag(q) - torch.outer(q, q)) / tau**2
        found.append(
            {
                "tau": tau,
                "measured": _listed(torch.linalg.eigvalsh(hessian)[1:]),
                "expected": _listed(torch.linalg.eigvalsh(expected)[1:]),
            }
        )
    return found


def trust_region(points: int = 41) -> dict[str, Any]:
    """What tau does: how far the optimum is from the reference, and how large the first step's force is."""
    taus = torch.logspace(-1, 1, points, dtype=torch.float64)
    distance, force = [], []
    for tau in taus:
        best = optimum(float(tau))
        objective = Objective(boltzmann(BETA), tau=float(tau))
        distance.append((best * (best.log() - reference())).sum())
        c = objective.coefficients(reference(), reference(), rewards=_row(ADVANTAGES))
        force.append(c.abs().max())
    return {"tau": _listed(taus), "kl": _listed(torch.stack(distance)), "force": _listed(torch.stack(force))}


def forces(reach: float = 3.0, points: int = 121, beta: float = 0.5) -> dict[str, Any]:
    """``-dL/dlogp`` of the better of two candidates against how far it has moved from the anchor."""
    moved = torch.linspace(-reach, reach, points, dtype=torch.float64)
    pairs = torch.stack([moved, torch.zeros_like(moved)], -1)
    anchor, rewards = torch.zeros_like(pairs), torch.tensor([1.0, 0.0], dtype=torch.float64).expand(points, 2)
    found = {
        name: -Objective(boltzmann(beta), divergence).coefficients(
            pairs, anchor, reduction="sum", rewards=rewards
        )[:, 0]
        for name, divergence in (("forward ADPO", cross_entropy), ("reverse ADPO", reverse_kl))
    }
    leaf = moved.clone().requires_grad_()
    loss = points * ppo_clip_loss(leaf, torch.zeros_like(leaf), torch.ones_like(leaf), CLIP)
    (slope,) = torch.autograd.grad(loss, leaf)
    found["PPO, clipped"] = -slope
    return {"moved": _listed(moved), "beta": beta, "forces": {name: _listed(each) for name, each in found.items()}}


def two_ways(points: int = 61, steps: int = 3000, rate: float = 0.02) -> dict[str, Any]:
    """A policy of one bump fitted to a target of two, by forward and by reverse KL, from the same start."""
    places = torch.linspace(-3, 3, points, dtype=torch.float64)
    bumps = 0.65 * torch.exp(-((places + 1.5) ** 2) / 0.18) + 0.35 * torch.exp(-((places - 1.5) ** 2) / 0.18)
    q = (bumps + 1e-6) / (bumps + 1e-6).sum()
    fitted = {}
    for name, divergence in (("forward KL", cross_entropy), ("reverse KL", reverse_kl)):
        objective = Objective(soft(), divergence)
        shape = torch.tensor([-0.5, -0.5], dtype=torch.float64, requires_grad=True)  # middle, log of the width
        optimizer = torch.optim.Adam([shape], rate)
        for _ in range(steps):
            logp = _bump(places, shape)
            optimizer.zero_grad()
            torch.autograd.backward(objective.loss(logp[None], None, q=q[None]))
            optimizer.step()
        fitted[name] = _listed(_bump(places, shape).detach().exp())
    return {"places": _listed(places), "target": _listed(q), "fitted": fitted}


def _bump(places: Tensor, shape: Tensor) -> Tensor:
    return (-((places - shape[0]) ** 2) / (2 * (2 * shape[1]).exp())).log_softmax(0)
