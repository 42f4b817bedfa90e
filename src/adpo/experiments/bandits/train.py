"""Training: all methods and replicas of a job together, one stacked forward and backward per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adpo.core.objective import Objective
from adpo.core.temperature import GuardedTau
from adpo.experiments.bandits import fleet
from adpo.experiments.bandits.methods import Batch, Groupwise, Method, together
from adpo.experiments.bandits.natural import natural_step
from adpo.experiments.bandits.protocol import Protocol
from adpo.experiments.bandits.world import Draws, Replica, Worlds
from adpo.experiments.stacked import Weights, guarded_taus

Observer = Callable[[int, "Training"], None]
"""Called before the first iteration (with 0) and after every iteration."""


@dataclass
class Training:
    """The state of a job: methods by replicas."""

    protocol: Protocol
    worlds: Worlds
    methods: list[Method]
    reference: Weights  # [replicas, ...]
    weights: list[Weights]  # of each method, [replicas, ...]; views of the stack for AdamW methods


def train(
    protocol: Protocol, replicas: Sequence[Replica], methods: Sequence[Method], observe: Observer | None = None
) -> Training:
    """Train every method on every replica and return the final state."""
    worlds = Worlds(protocol, replicas)
    count = len(replicas)
    reference = fleet.reference_weights(protocol, worlds)
    stacked = [method for method in methods if method.region is None]
    stack = fleet.repeated(reference, len(stacked)) if stacked else []
    optimizer = fleet.adamw(stack, protocol) if stacked else None
    views = iter(fleet.part([w.detach() for w in stack], i, count) for i in range(len(stacked)))
    weights = [next(views) if m.region is None else [w.clone() for w in reference] for m in methods]
    state = Training(protocol, worlds, list(methods), reference, weights)
    runners = [_Runner(method, state, number) for number, method in enumerate(methods)]
    first_order = [runner for runner in runners if runner.method.region is None]
    if observe:
        observe(0, state)
    for iteration in range(1, protocol.iterations + 1):
        draws = worlds.draw()
        with torch.no_grad():
            log_reference = fleet.log_policy(reference, draws.contexts)
        for runner in runners:
            runner.begin(draws, log_reference)
        many = draws.contexts.repeat(len(stacked), 1, 1) if stacked else draws.contexts
        for _ in range(protocol.inner_steps):
            if optimizer is not None:
                log_policies = torch.split(fleet.log_policy(stack, many), count)
                for runner, log_policy in zip(first_order, log_policies, strict=True):
                    runner.batch.log_policy = log_policy
                optimizer.zero_grad()
                _total_loss(first_order).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for runner in runners:
                runner.after_step()
        for runner in runners:
            runner.finish(iteration)
        if observe:
            observe(iteration, state)
    return state


def _total_loss(runners: Sequence[_Runner]) -> Tensor:
    """Summed over methods and replicas: no run sees another's gradient."""
    kin: dict[Objective, list[_Runner]] = {}
    losses = []
    for runner in runners:
        if isinstance(runner.method.loss, Groupwise):
            kin.setdefault(runner.method.loss.kin, []).append(runner)
        else:
            losses.append(runner.method.loss(runner.batch))
    for members in kin.values():
        shared = [member.method.loss for member in members if isinstance(member.method.loss, Groupwise)]
        losses += together(shared, [member.batch for member in members])
    return torch.cat(losses).sum()


class _Runner:
    """One method inside a job: its data, its anchor, its temperature."""

    def __init__(self, method: Method, state: Training, number: int) -> None:
        self.method, self.state, self.number = method, state, number
        self.anchor = [weight.clone() for weight in state.reference]
        bounds = method.guarded
        self.guards = [GuardedTau(*bounds) for _ in state.worlds.replicas] if bounds else []
        self.batch: Batch

    @property
    def weights(self) -> Weights:
        return self.state.weights[self.number]

    def begin(self, draws: Draws, log_reference: Tensor) -> None:
        """Sample (or take the lists), observe, set the temperature."""
        self.draws = draws
        with torch.no_grad():
            log_old = fleet.log_policy(self.weights, draws.contexts)
            items = draws.items
            if self.method.samples == "policy":
                items = (log_old.unsqueeze(-2) + draws.gumbel).argmax(-1)
            rewards = self.state.worlds.observed(draws, items)
            self.batch = Batch(log_old, log_old, None, log_reference, items, rewards)
            self._set_anchor()
            if self.guards:
                self.batch.tau = self._guarded(log_old, rewards)

    def _set_anchor(self) -> None:
        rule = self.method.anchor
        if rule == "reference":
            self.batch.log_anchor = self.batch.log_reference
        elif rule == "old":
            self.batch.log_anchor = self.batch.log_old
        elif rule in ("ema", "refresh"):
            with torch.no_grad():
                self.batch.log_anchor = fleet.log_policy(self.anchor, self.draws.contexts)

    def _guarded(self, log_old: Tensor, rewards: Tensor) -> Tensor:
        """Confidence from the policy's entropy over the items, improvement from the mean observed reward."""
        items = torch.tensor(float(self.state.protocol.items))
        entropy = -(log_old.exp() * log_old).sum(-1).mean(1) / items.log()
        mean = rewards.median(-1).values.mean(1)  # the middle of a list: Cauchy noise has no mean
        return guarded_taus(self.guards, entropy, mean)

    def after_step(self) -> None:
        if self.method.anchor == "ema" and self.method.region is None:
            with torch.no_grad():
                for shadow, weight in zip(self.anchor, self.weights, strict=True):
                    shadow.lerp_(weight, 1 - self.method.decay)
            self._set_anchor()

    def finish(self, iteration: int) -> None:
        """The natural step, where that is how the method moves, and the refresh of its anchor."""
        if self.method.region is not None:
            natural_step(self.weights, self._loss_at, self._kl_at, self.method.region)
        if self.method.anchor == "refresh" and iteration % self.method.every == 0:
            for shadow, weight in zip(self.anchor, self.weights, strict=True):
                shadow.copy_(weight)

    def _loss_at(self, weights: Weights) -> Tensor:
        self.batch.log_policy = fleet.log_policy(weights, self.draws.contexts)
        return self.method.loss(self.batch)

    def _kl_at(self, weights: Weights) -> Tensor:
        log_old = self.batch.log_old
        return (log_old.exp() * (log_old - fleet.log_policy(weights, self.draws.contexts))).sum(-1).mean(1)
