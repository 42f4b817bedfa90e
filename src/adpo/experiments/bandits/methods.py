"""The methods: how each turns what it sees into a loss. ADPO's are settings of `adpo.Objective`; the rest are
textbook.

Every method is made by a function of its hyper-parameters, listed in `GRID`; the values used for the reported
runs are in `settings.json`, with the command that found them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from adpo.core import presets
from adpo.core.divergences import Divergence, alpha, cross_entropy, reverse_kl, wasserstein
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
Source = Literal["lists", "policy"]
Scope = Literal["batch", "group"]


@dataclass(frozen=True)
class Method:
    """A method with its hyper-parameters fixed."""

    name: str
    loss: Loss
    settings: dict[str, Any] = field(default_factory=dict)
    samples: Source = "lists"
    anchor: AnchorRule = "reference"
    decay: float = 0.99  # of an averaged anchor
    every: int = 20  # iterations between refreshes of the anchor
    guarded: tuple[float, float] | None = None  # bounds of the guarded temperature
    region: TrustRegion | None = None  # natural-gradient steps instead of AdamW


@dataclass(frozen=True)
class Groupwise:
    """An ADPO objective over the lists as groups."""

    objective: Objective

    def __call__(self, batch: Batch) -> Tensor:
        return together([self], [batch])[0]

    @property
    def kin(self) -> Objective:
        """Equal for objectives that differ in tau alone."""
        return replace(self.objective, tau=1.0)


def together(losses: Sequence[Groupwise], batches: Sequence[Batch]) -> list[Tensor]:
    """The losses of several methods of one kin, ``[replicas]`` each, in one call of their objective."""
    contexts, listed = batches[0].items.shape[1:]

    def rows(tables: Iterable[Tensor]) -> Tensor:
        return torch.cat([table.reshape(-1, listed) for table in tables])

    policies = [batch.of(batch.log_policy) for batch in batches]
    anchors = [
        torch.zeros_like(policy) if batch.log_anchor is None else batch.of(batch.log_anchor)
        for policy, batch in zip(policies, batches, strict=True)
    ]
    taus = [
        torch.full((len(batch.items),), loss.objective.tau, dtype=torch.float64)
        if batch.tau is None
        else batch.tau
        for loss, batch in zip(losses, batches, strict=True)
    ]
    values = losses[0].objective.loss(
        rows(policies),
        rows(anchors),
        tau=torch.cat(taus).repeat_interleave(contexts),
        reduction="none",
        rewards=rows(batch.rewards for batch in batches),
    )
    means = values.view(-1, contexts).mean(1)
    return list(torch.split(means, [len(batch.items) for batch in batches]))


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


def policy_gradient(clip: float | None, penalty: float, standardize: Scope, listed_uniformly: bool) -> Loss:
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
    return Method(name, Groupwise(Objective(target, divergence, tau)), **rest)


def _policy_gradient(
    name: str, samples: Source, standardize: Scope, clip: float | None, penalty: float = 0.0, **rest: Any
) -> Method:
    loss = policy_gradient(clip, penalty, standardize, samples == "lists")
    return Method(name, loss, samples=samples, anchor="zero", **rest)


def _natural(target: str, tau: float, every: int | None) -> Method:
    anchor: AnchorRule = "reference" if every is None else "refresh"
    return _adpo(
        "adpo-natural", ORDINAL[target], tau, anchor=anchor, every=every or 1, region=TrustRegion(max_kl=0.01)
    )


ORDINAL: dict[str, Target] = {"ranking": plackett_luce(), "top1": top1_target()}
DIVERGENCES: dict[str, Divergence] = {
    str(divergence): divergence for divergence in (cross_entropy, reverse_kl, alpha(0.5), wasserstein(1))
}
MAKERS: dict[str, Callable[..., Method]] = {
    "sft-best": lambda: Method("sft-best", best_observed, anchor="zero"),
    "dpo-hard": lambda beta: Method("dpo-hard", pairwise(presets.dpo(beta), DISJOINT)),
    "dpo-soft": lambda beta, scale: Method("dpo-soft", pairwise(presets.soft_dpo(beta), DISJOINT, soft=scale)),
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
    "adpo-natural": _natural,
    "adpo-divergence": lambda divergence, beta, tau: _adpo(divergence, kde(beta), tau, DIVERGENCES[divergence]),
    "ppo-clip": lambda samples, clip: _policy_gradient("ppo-clip", samples, "batch", clip),
    "grpo": lambda samples, clip: _policy_gradient("grpo", samples, "group", clip),
    "kl-penalty": lambda samples, advantages, penalty: _policy_gradient(
        "kl-penalty", samples, advantages, None, penalty
    ),
    "trpo": lambda samples, advantages, max_kl: _policy_gradient(
        "trpo", samples, advantages, None, region=TrustRegion(max_kl)
    ),
}

BETAS = [0.25, 0.5, 1.0]
TAUS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
PAIR_BETAS = [0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2]
SEEN: list[Source] = ["policy", "lists"]
GRID: dict[str, dict[str, list[Any]]] = {
    "sft-best": {},
    "dpo-hard": {"beta": PAIR_BETAS},
    "dpo-soft": {"beta": PAIR_BETAS[1:-1], "scale": [0.3, 1.0]},
    "adpo-pairwise": {"beta": [0.3, 1.0], "tau": TAUS},
    "adpo-raw": {"beta": BETAS, "tau": [1.0, 4.0, 8.0, 16.0]},
    "adpo-kde": {"beta": BETAS, "tau": [1.0, 4.0, 8.0, 16.0]},
    "adpo-ranking": {"tau": [0.5, *TAUS]},
    "adpo-top1": {"tau": [0.5, *TAUS]},
    "adpo-on-policy": {"beta": BETAS, "tau": [0.5, 1.0, 2.0, 4.0]},
    "adpo-ema": {"beta": BETAS, "tau": [1.0, 4.0], "decay": [0.99, 0.997]},
    "adpo-refresh": {"beta": BETAS, "tau": [1.0, 4.0], "every": [20, 50]},
    "adpo-guarded": {"beta": BETAS, "tau_max": [1.0, 4.0, 8.0, 16.0]},
    "adpo-natural": {"target": ["ranking", "top1"], "tau": [2.0, 4.0], "every": [30, 50, None]},
    "ppo-clip": {"samples": SEEN, "clip": [0.1, 0.2, 0.3, 0.4, 0.6, 0.8]},
    "grpo": {"samples": SEEN, "clip": [0.1, 0.2, 0.3, 0.4, 0.6, 0.8]},
    "kl-penalty": {"samples": SEEN, "advantages": ["batch", "group"], "penalty": [0.01, 0.05, 0.2]},
    "trpo": {"samples": SEEN, "advantages": ["batch", "group"], "max_kl": [0.003, 0.01, 0.03]},
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
