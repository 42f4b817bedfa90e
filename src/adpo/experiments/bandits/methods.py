"""The methods: how each turns what it sees into a loss. ADPO's are settings of `adpo.Objective`; the rest are
textbook.

Every method is made by a function of its hyper-parameters, listed in `GRID`; the values used for the reported
runs are in `settings.json`, with the command that found them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from adpo.core import presets
from adpo.core.divergences import Divergence, cross_entropy
from adpo.core.objective import Objective
from adpo.core.ranking import plackett_luce
from adpo.core.targets import Target, boltzmann, bradley_terry, kde
from adpo.core.targets import top1 as top1_target
from adpo.experiments.bandits.natural import TrustRegion


@dataclass
class Batch:
    """What one method sees of an iteration, all its runs stacked; ``[replicas, contexts, ...]``."""

    log_policy: Tensor  # [.., items], differentiable
    log_old: Tensor  # [.., items], when the data were drawn
    log_anchor: Tensor | None  # [.., items]
    log_reference: Tensor  # [.., items]
    items: Tensor  # [.., listed]
    rewards: Tensor  # [.., listed], corrupted
    tau: Tensor | None = None  # [replicas], from a schedule

    def of(self, log_table: Tensor) -> Tensor:
        """Log-probabilities of the seen items, [.., listed]."""
        return log_table.gather(-1, self.items)


Loss = Callable[[Batch], Tensor]
"""The mean loss of each run, ``[replicas]``."""

AnchorRule = Literal["zero", "reference", "old", "ema", "refresh"]


@dataclass(frozen=True)
class Method:
    """A method with its hyper-parameters fixed."""

    name: str
    loss: Loss
    settings: dict[str, Any] = field(default_factory=dict)
    samples: Literal["lists", "policy"] = "lists"
    anchor: AnchorRule = "reference"
    decay: float = 0.99  # of an averaged anchor
    every: int = 20  # iterations between refreshes of the anchor
    guarded: tuple[float, float] | None = None  # bounds of the guarded temperature
    region: TrustRegion | None = None  # natural-gradient steps instead of AdamW


def groupwise(objective: Objective) -> Loss:
    """An ADPO objective over the lists as groups."""

    def loss(batch: Batch) -> Tensor:
        replicas, contexts, listed = batch.items.shape
        anchor = None if batch.log_anchor is None else batch.of(batch.log_anchor).reshape(-1, listed)
        tau = None if batch.tau is None else batch.tau.repeat_interleave(contexts)
        values = objective.loss(
            batch.of(batch.log_policy).reshape(-1, listed),
            anchor,
            tau=tau,
            reduction="none",
            rewards=batch.rewards.reshape(-1, listed),
        )
        return values.view(replicas, contexts).mean(1)

    return loss


def pairwise(objective: Objective, pairs: list[tuple[int, int]], soft: float | None = None) -> Loss:
    """The same over pairs of listed items; ``soft`` turns reward differences into P(first wins) at that scale."""
    first, second = (torch.tensor(side) for side in zip(*pairs, strict=True))

    def paired(table: Tensor) -> Tensor:
        return torch.stack([table[..., first], table[..., second]], -1).reshape(-1, 2)

    def loss(batch: Batch) -> Tensor:
        rewards = paired(batch.rewards)
        signal = {"rewards": rewards}
        if soft is not None:
            signal = {"preference": torch.sigmoid((rewards[:, 0] - rewards[:, 1]) / soft)}
        anchor = None if batch.log_anchor is None else paired(batch.of(batch.log_anchor))
        values = objective.loss(paired(batch.of(batch.log_policy)), anchor, reduction="none", **signal)
        return values.view(len(batch.items), -1).mean(1)

    return loss


def policy_gradient(
    clip: float | None, penalty: float, standardize: Literal["batch", "group"], listed_uniformly: bool
) -> Loss:
    """Importance-weighted surrogate: clipped (PPO, GRPO), penalised by KL(policy || reference), or plain."""

    def loss(batch: Batch) -> Tensor:
        axes = (1, 2) if standardize == "batch" else (2,)
        centred = batch.rewards - batch.rewards.mean(axes, keepdim=True)
        advantages = centred / (batch.rewards.std(axes, keepdim=True) + 1e-4)
        old = batch.of(batch.log_old)
        ratio = (batch.of(batch.log_policy) - old).exp()
        gain = ratio * advantages
        if clip is not None:
            gain = torch.minimum(gain, ratio.clamp(1 - clip, 1 + clip) * advantages)
        if listed_uniformly:  # the items came from a uniform draw, not from the policy
            gain = gain * old.exp() * batch.log_old.shape[-1]
        value = -gain.mean((1, 2))
        if penalty:
            gap = batch.log_policy - batch.log_reference
            value = value + penalty * (batch.log_policy.exp() * gap).sum(-1).mean(1)
        return value

    return loss


def best_observed(batch: Batch) -> Tensor:
    """Supervised fine-tuning on the item with the highest observed reward of each list."""
    best = batch.items.gather(-1, batch.rewards.argmax(-1, keepdim=True))
    return -batch.log_policy.gather(-1, best).mean((1, 2))


DISJOINT = [(0, 1), (2, 3), (4, 5)]
ALL_PAIRS = list(itertools.combinations(range(6), 2))


def _adpo(name: str, target: Target, tau: float, divergence: Divergence = cross_entropy, **rest: Any) -> Method:
    return Method(name, groupwise(Objective(target, divergence, tau)), **rest)


def _policy_gradient(
    name: str, samples: Literal["lists", "policy"], clip: float | None, penalty: float, **rest: Any
) -> Method:
    standardize: Literal["batch", "group"] = "group" if name == "grpo" else "batch"
    return Method(
        name,
        policy_gradient(clip, penalty, standardize, samples == "lists"),
        samples=samples,
        anchor="zero",
        **rest,
    )


MAKERS: dict[str, Callable[..., Method]] = {
    "sft-best": lambda: Method("sft-best", best_observed, anchor="zero"),
    "dpo-hard": lambda beta: Method("dpo-hard", pairwise(presets.dpo(beta), DISJOINT)),
    "dpo-soft": lambda beta: Method("dpo-soft", pairwise(presets.soft_dpo(beta), DISJOINT, soft=1.0)),
    "adpo-pairwise": lambda beta, tau: Method(
        "adpo-pairwise", pairwise(Objective(bradley_terry(), tau=tau), ALL_PAIRS, soft=beta)
    ),
    "adpo-raw": lambda beta, tau: _adpo("adpo-raw", boltzmann(beta), tau),
    "adpo-kde": lambda beta, tau: _adpo("adpo-kde", kde(beta), tau),
    "adpo-ranking": lambda tau: _adpo("adpo-ranking", plackett_luce(), tau),
    "adpo-top1": lambda tau: _adpo("adpo-top1", top1_target(), tau),
    "adpo-on-policy": lambda beta, tau: _adpo("adpo-on-policy", kde(beta), tau, anchor="old"),
    "adpo-ema": lambda beta, tau, decay: _adpo("adpo-ema", kde(beta), tau, anchor="ema", decay=decay),
    "adpo-refresh": lambda beta, tau, every: _adpo("adpo-refresh", kde(beta), tau, anchor="refresh", every=every),
    "adpo-guarded": lambda beta, tau_max: _adpo("adpo-guarded", kde(beta), 1.0, guarded=(0.25 * tau_max, tau_max)),
    "adpo-natural": lambda tau, max_kl, every: _adpo(
        "adpo-natural", plackett_luce(), tau, anchor="refresh", every=every, region=TrustRegion(max_kl)
    ),
    "ppo-clip": lambda samples, clip: _policy_gradient("ppo-clip", samples, clip, 0.0),
    "grpo": lambda samples, clip: _policy_gradient("grpo", samples, clip, 0.0),
    "kl-penalty": lambda samples, penalty: _policy_gradient("kl-penalty", samples, None, penalty),
    "trpo": lambda samples, max_kl: _policy_gradient("trpo", samples, None, 0.0, region=TrustRegion(max_kl)),
}

TEMPERATURES = [1.0, 4.0, 8.0, 16.0]
GRID: dict[str, dict[str, list[Any]]] = {
    "sft-best": {},
    "dpo-hard": {"beta": [0.03, 0.06, 0.12, 0.25, 0.5, 1.0]},
    "dpo-soft": {"beta": [0.03, 0.06, 0.12, 0.25, 0.5, 1.0]},
    "adpo-pairwise": {"beta": [0.5, 1.0, 2.0], "tau": TEMPERATURES},
    "adpo-raw": {"beta": [0.5, 1.0, 2.0], "tau": TEMPERATURES},
    "adpo-kde": {"beta": [0.5, 1.0, 2.0], "tau": TEMPERATURES},
    "adpo-ranking": {"tau": [1.0, 2.0, 4.0, 8.0, 16.0]},
    "adpo-top1": {"tau": [1.0, 2.0, 4.0, 8.0, 16.0]},
    "adpo-on-policy": {"beta": [0.5, 1.0], "tau": [0.5, 1.0, 2.0, 4.0]},
    "adpo-ema": {"beta": [0.5, 1.0], "tau": [1.0, 4.0], "decay": [0.99, 0.997]},
    "adpo-refresh": {"beta": [0.5, 1.0], "tau": [1.0, 4.0], "every": [20, 50]},
    "adpo-guarded": {"beta": [0.5, 1.0], "tau_max": [1.0, 4.0, 8.0, 16.0]},
    "adpo-natural": {"tau": [2.0, 8.0], "max_kl": [0.003, 0.01], "every": [50, 1000]},
    "ppo-clip": {"samples": ["policy", "lists"], "clip": [0.1, 0.2, 0.4]},
    "grpo": {"samples": ["policy", "lists"], "clip": [0.1, 0.2, 0.4]},
    "kl-penalty": {"samples": ["policy", "lists"], "penalty": [0.01, 0.05, 0.2]},
    "trpo": {"samples": ["policy", "lists"], "max_kl": [0.003, 0.01, 0.03]},
}


def make(name: str, settings: dict[str, Any]) -> Method:
    """The method with these hyper-parameters, recorded in it."""
    made = MAKERS[name](**settings)
    return Method(**{**made.__dict__, "settings": dict(settings)})


def grid(name: str) -> Iterator[dict[str, Any]]:
    """All combinations of the method's hyper-parameters that the sweep tries."""
    axes = GRID[name]
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
