"""Algorithm 1 of the paper, online and offline, step by step over any scoring module.

The policy is a module with ``policy(contexts, candidates) -> logp [groups, K]``. Data come from a `World`
(online: contexts, sampling, rewards) or an iterable of `Batch` (offline). The trainers are held to this oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
    lowest = torch.finfo(torch.float64).min  # finite: an empty set has entropy 0, not NaN
    p = torch.softmax(torch.where(mask, logp.detach().double(), lowest), -1) * mask
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy / mask.sum(-1).clamp(min=2).log()


@dataclass
class Algorithm1:
    """What both modes share; ``entropy`` is the confidence signal of the temperature, in [0, 1]."""

    policy: nn.Module
    objective: Objective
    temperature: Temperature
    optimizer: torch.optim.Optimizer
    entropy: Callable[[Tensor, Tensor | None], Scalars] = group_entropy

    def online(self, world: World, *, iterations: int, inner_steps: int = 1) -> Iterator[Step]:
        """Anchor to the sampling policy, sample, reward, update ``inner_steps`` times."""
        anchor = OnPolicy(self.policy)
        for _ in range(iterations):
            contexts = world.contexts()  # sample contexts
            anchor.on_rollout()  # pi_ref <- pi_old
            candidates = world.sample(self.policy, contexts)  # sample a group for each
            rewards = world.rewards(contexts, candidates)  # the target standardises them (z-score) itself
            yield from self._updates(Batch(contexts, candidates, {"rewards": rewards}), anchor, inner_steps)

    def offline(self, batches: Iterable[Batch], anchor: Anchor) -> Iterator[Step]:
        """Fixed groups; the anchor is fixed, or dynamic by its own rule (refresh every N steps, EMA)."""
        for batch in batches:  # retrieve groups and their preferences
            yield from self._updates(batch, anchor, 1)

    def _updates(self, batch: Batch, anchor: Anchor, steps: int) -> Iterator[Step]:
        anchor_logp = anchor.logp(lambda module: module(batch.contexts, batch.candidates))
        reward = _mean_reward(batch)
        tau: Scalars | None = None
        for _ in range(steps):
            logp = self.policy(batch.contexts, batch.candidates)
            if tau is None:  # 1. adaptive temperature, per context, once a batch
                mean_reward = reward if reward == reward else 0.0  # without rewards nothing can improve
                tau = self.temperature.update(entropy=self.entropy(logp, batch.mask), reward=mean_reward)
            # 2. anchored logits, target and divergence: u = (logp - anchor_logp)/tau, D(Q, softmax(u))
            table = {"mask": batch.mask, "tau": tau, **batch.signals}
            loss = self.objective.loss(logp, anchor_logp, **table)  # type: ignore[arg-type]
            diagnostics = self.objective.diagnostics(logp, anchor_logp, **table)  # type: ignore[arg-type]
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()  # theta <- theta - eta * gradient
            anchor.on_step()  # a dynamic anchor moves
            yield Step(loss.item(), tau, reward, diagnostics)


def _mean_reward(batch: Batch) -> float:
    if "rewards" not in batch.signals:
        return float("nan")
    rewards = batch.signals["rewards"].double()
    return float(rewards.mean() if batch.mask is None else rewards[batch.mask].mean())
