"""Two studies that are no training of all methods: popular but wrong, and gradient variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adpo.core import presets
from adpo.experiments.bandits import fleet, jobs
from adpo.experiments.bandits.methods import (
    Batch,
    Groupwise,
    Loss,
    best_observed,
    make,
    policy_gradient,
)
from adpo.experiments.bandits.protocol import MEDIUM, Protocol
from adpo.experiments.bandits.train import train
from adpo.experiments.bandits.world import Replica, Worlds
from adpo.experiments.workers import Report

COLLAPSED = 0.05
"""A run has collapsed when its policy's mean entropy (nats) is below this."""


@dataclass(frozen=True)
class Popular:
    """A context-free bandit whose reference favours the wrong items."""

    items: int = 10
    best_reward: float = 1.0
    bad_reward: float = -1.0
    noise: float = 0.3
    listed: int = 6
    lists: int = 16
    steps: int = 300
    learning_rate: float = 0.05
    suppressed: float = 0.05  # the wrong items hold less than this


def popular_but_wrong(
    setting: Popular, kind: str, mass: float, seeds: Sequence[int], report: Report
) -> list[dict[str, Any]]:
    """Mass left on the wrong items, mass smeared over the rest, steps until the wrong ones are suppressed."""
    wrong = torch.zeros(setting.items, dtype=torch.bool)
    wrong[1 if kind == "bad" else slice(2, 5)] = True
    truth = torch.zeros(setting.items)
    truth[0], truth[1] = setting.best_reward, setting.bad_reward
    reference = torch.where(wrong, mass / wrong.sum(), (1 - mass) / (~wrong).sum()).log()
    losses: dict[str, Loss] = {
        "sft-best": best_observed,
        "kd": _teacher_loss(torch.log_softmax(reference + truth / 0.5, 0)),
        "dpo-hard": make("dpo-hard", {"beta": 0.1}).loss,
        "ppo-clip": policy_gradient(0.2, 0.0, "batch", listed_uniformly=False),
        "adpo-raw": Groupwise(presets.listwise_raw(beta=0.5)),
        "adpo-ranking": Groupwise(presets.anchored_ranking()),
    }
    records = []
    for number, (name, loss) in enumerate(losses.items()):
        report(number / len(losses))
        logits = reference.expand(len(seeds), 1, -1).clone().requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=setting.learning_rate)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        steps = torch.full((len(seeds),), setting.steps)
        for step in range(setting.steps):
            log_policy = torch.log_softmax(logits, -1).expand(-1, setting.lists, -1)
            sampler = log_policy.detach()[:, 0] if name == "ppo-clip" else reference.expand(len(seeds), -1)
            items, rewards = _lists(setting, sampler, truth, generators)
            old = log_policy.detach()
            anchor = reference.expand_as(old)
            optimizer.zero_grad()
            loss(Batch(log_policy, old, anchor, anchor, items, rewards)).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            left = torch.softmax(logits.detach()[:, 0], -1)[:, wrong].sum(-1)
            steps = torch.where((left < setting.suppressed) & (steps == setting.steps), step + 1, steps)
        policy = torch.softmax(logits.detach()[:, 0], -1)
        for i, seed in enumerate(seeds):
            on_wrong, on_best = float(policy[i, wrong].sum()), float(policy[i, 0])
            records.append(
                {
                    "method": name,
                    "seed": seed,
                    "wrong": round(on_wrong, 6),
                    "best": round(on_best, 6),
                    "smeared": round(1 - on_wrong - on_best, 6),
                    "steps": int(steps[i]),
                }
            )
    return records


def _lists(
    setting: Popular, log_sampler: Tensor, truth: Tensor, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    size = (setting.lists, setting.listed)
    items = torch.stack(
        [
            torch.multinomial(p.exp(), size[0] * size[1], replacement=True, generator=g).view(size)
            for p, g in zip(log_sampler, generators, strict=True)
        ]
    )
    noise = torch.stack([torch.randn(size, generator=g) for g in generators])
    return items, truth[items] + setting.noise * noise


def _teacher_loss(teacher: Tensor) -> Loss:
    return lambda batch: -(teacher.exp() * batch.log_policy).sum(-1).mean(1)


def gradient_variance(
    protocol: Protocol, moment: str, seeds: Sequence[int], report: Report, samples: int = 200
) -> list[dict[str, Any]]:
    """Trace of the gradient's covariance over resampled groups, raw and relative to the squared mean gradient.

    At the reference policy (``start``) or half-way through an ADPO run (``middle``), medium Gaussian noise.
    """
    short = replace(protocol, iterations=protocol.iterations // 2)
    records = []
    for number, seed in enumerate(seeds):
        report(number / len(seeds))
        replicas = [Replica(MEDIUM["gaussian"], seed)]
        if moment == "start":
            weights = reference = fleet.reference_weights(protocol, Worlds(protocol, replicas))
        else:
            state = train(short, replicas, [make("adpo-kde", jobs.tuned()["adpo-kde"])])
            weights, reference = state.weights[0], state.reference
        worlds = Worlds(protocol, replicas)
        draws = [worlds.draw() for _ in range(samples)]
        contexts = draws[0].contexts.expand(
            samples, -1, -1
        )  # the same contexts: only groups and noise are resampled
        gumbel = torch.cat([d.gumbel for d in draws])
        fixed = draws[0]._replace(contexts=contexts)
        stack = fleet.repeated(weights, samples)
        log_policy = fleet.log_policy(stack, contexts)
        old = log_policy.detach()
        items = (old.unsqueeze(-2) + gumbel).argmax(-1)
        noisy = [
            worlds.observed(d._replace(contexts=draws[0].contexts), items[i : i + 1]) for i, d in enumerate(draws)
        ]
        log_reference = fleet.log_policy([w.detach() for w in fleet.repeated(reference, samples)], fixed.contexts)
        batch = Batch(log_policy, old, old, log_reference, items, torch.cat(noisy))
        value = (old[:1].exp() * worlds.clean_rewards(draws[0].contexts)).sum(-1)
        for name, loss in _estimators(value).items():
            gradients = torch.autograd.grad(loss(batch).sum(), stack, retain_graph=True)
            flat = torch.cat([g.reshape(samples, -1) for g in gradients], 1).double()
            mean = flat.mean(0)
            trace = float((flat - mean).square().sum() / (samples - 1))
            relative = trace / float(mean.square().sum())
            records.append({"estimator": name, "seed": seed, "trace": trace, "relative": relative})
    return records


def _estimators(value: Tensor) -> dict[str, Loss]:
    def reinforce(batch: Batch) -> Tensor:
        return -(batch.of(batch.log_policy) * batch.rewards).mean((1, 2))

    def with_value(batch: Batch) -> Tensor:
        return -(batch.of(batch.log_policy) * (batch.rewards - value.unsqueeze(-1))).mean((1, 2))

    def unanchored(batch: Batch) -> Tensor:
        return adpo(Batch(**{**batch.__dict__, "log_anchor": None}))

    adpo = Groupwise(presets.adpo(beta=1.0))
    return {
        "reinforce": reinforce,
        "reinforce, value baseline": with_value,
        "ppo": policy_gradient(0.2, 0.0, "batch", listed_uniformly=False),
        "grpo": policy_gradient(0.2, 0.0, "group", listed_uniformly=False),
        "adpo, no anchor": unanchored,
        "adpo, on-policy anchor": adpo,
    }
