"""Algorithm 1 of the paper, online and offline, step by step over any scoring module.

The policy is a module with ``policy(contexts, candidates) -> logp [groups, K]``. Data come from a `World`
(online: contexts, sampling, rewards) or an iterable of `Batch` (offline). The trainers are held to this oracle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from adpo.anchors import Anchor, OnPolicy
from adpo.core.objective import Diagnostics, Objective
from adpo.core.temperature import Scalars, Temperature


class Batch(NamedTuple):
    """Groups of candidates: ``contexts`` [groups, ...], ``candidates`` [groups, K, ...], named signals."""

    contexts: Tensor
    candidates: Tensor
    signals: dict[str, Tensor]
    mask: Tensor | None = None


class World(Protocol):
    """Where online training gets its groups from."""

    def contexts(self) -> Tensor: ...

    def sample(self, policy: nn.Module, contexts: Tensor) -> Tensor: ...

    def rewards(self, contexts: Tensor, candidates: Tensor) -> Tensor: ...


class Step(NamedTuple):
    """One update, as it happened."""

    loss: float
    tau: Scalars
    reward: float
    diagnostics: Diagnostics


def group_entropy(logp: Tensor, mask: Tensor | None) -> Tensor:
    """Entropy of the policy over each candidate set, divided by its maximum log K; ``[groups]``."""
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    p = torch.softmax(torch.where(mask, logp.detach().double(), -torch.inf), -1)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy / mask.sum(-1).clamp(min=2).log()


def online(
    policy: nn.Module,
    world: World,
    objective: Objective,
    temperature: Temperature,
    optimizer: torch.optim.Optimizer,
    *,
    iterations: int,
    inner_steps: int = 1,
) -> Iterator[Step]:
    """Online mode: anchor to the sampling policy, sample, reward, update ``inner_steps`` times."""
    anchor = OnPolicy(policy)
    for _ in range(iterations):
        contexts = world.contexts()  # sample contexts
        anchor.on_rollout()  # pi_ref <- pi_old
        candidates = world.sample(policy, contexts)  # sample a group for each
        rewards = world.rewards(contexts, candidates)  # the target standardises them (z-score) itself
        batch = Batch(contexts, candidates, {"rewards": rewards})
        yield from _updates(policy, batch, objective, temperature, anchor, optimizer, inner_steps)


def offline(
    policy: nn.Module,
    batches: Iterable[Batch],
    objective: Objective,
    temperature: Temperature,
    anchor: Anchor,
    optimizer: torch.optim.Optimizer,
) -> Iterator[Step]:
    """Offline mode: fixed groups; the anchor is fixed, or dynamic by its own rule (refresh every N, EMA)."""
    for batch in batches:  # retrieve groups and their preferences
        yield from _updates(policy, batch, objective, temperature, anchor, optimizer, 1)


def _updates(
    policy: nn.Module,
    batch: Batch,
    objective: Objective,
    temperature: Temperature,
    anchor: Anchor,
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> Iterator[Step]:
    anchor_logp = anchor.logp(lambda module: module(batch.contexts, batch.candidates))
    rewards = batch.signals.get("rewards")
    reward = float("nan") if rewards is None else _mean(rewards, batch.mask)
    tau: Scalars | None = None
    for _ in range(steps):
        logp = policy(batch.contexts, batch.candidates)
        if tau is None:  # 1. adaptive temperature, once per batch; without rewards nothing can improve
            entropy = group_entropy(logp, batch.mask)
            tau = temperature.update(entropy=entropy, reward=0.0 if rewards is None else reward)
        # 2. anchored logits, target and divergence: u = (logp - anchor_logp)/tau, D(Q, softmax(u))
        table = {"mask": batch.mask, "tau": tau, **batch.signals}
        loss = objective.loss(logp, anchor_logp, **table)  # type: ignore[arg-type]
        diagnostics = objective.diagnostics(logp, anchor_logp, **table)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # theta <- theta - eta * gradient
        anchor.on_step()  # a dynamic anchor moves
        yield Step(loss.item(), tau, reward, diagnostics)


def _mean(values: Tensor, mask: Tensor | None) -> float:
    return float(values.double().mean() if mask is None else values[mask].double().mean())
