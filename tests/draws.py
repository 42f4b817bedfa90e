"""What the property tests draw: tables of groups, and every objective with a finite divergence."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import adpo

TARGETS = {
    "one_hot": adpo.one_hot(),
    "one_hot smoothed": adpo.one_hot(label_smoothing=0.2),
    "soft": adpo.targets.soft(),
    "soft smoothed": adpo.targets.soft(label_smoothing=0.2),
    "teacher": adpo.targets.teacher(),
    "teacher anchored": adpo.targets.teacher(anchored=True),
    "boltzmann": adpo.boltzmann(0.7),
    "boltzmann standardized": adpo.boltzmann(0.7, standardize=True),
    "boltzmann reference": adpo.boltzmann(0.7, reference=True),
    "kde": adpo.kde(0.7),
    "top1": adpo.top1(),
    "top1 smoothed": adpo.top1(label_smoothing=0.2),
    "efron": adpo.plackett_luce(),
    "efron smoothed": adpo.plackett_luce(label_smoothing=0.2),
    "breslow": adpo.plackett_luce(ties="breslow"),
    "breslow smoothed": adpo.plackett_luce(ties="breslow", label_smoothing=0.2),
}
PAIR_TARGETS = {
    "bradley_terry": adpo.bradley_terry(),
    "bradley_terry smoothed": adpo.bradley_terry(label_smoothing=0.2),
}
DIVERGENCES = [
    adpo.cross_entropy,
    adpo.forward_kl,
    adpo.reverse_kl,
    adpo.divergences.alpha(0.5),
    adpo.divergences.alpha(0.3),
    adpo.divergences.alpha(2.0),
    adpo.divergences.alpha(-0.5),
    adpo.wasserstein(1),
    adpo.wasserstein(2),
]


SPREADS = [0.1, 1.0, 5.0]


def finite(target: adpo.Target, divergence: adpo.Divergence) -> bool:
    return divergence.finite_at_zeros or not target.has_zeros


OBJECTIVES = {
    f"{name}/{divergence}": (target, divergence)
    for name, target in TARGETS.items()
    for divergence in DIVERGENCES
    if finite(target, divergence)
}


@dataclass
class Groups:
    """One batch of groups with every signal a target may ask for; float64."""

    logp: Tensor
    anchor_logp: Tensor
    mask: Tensor
    tau: float
    rewards: Tensor
    labels: Tensor
    teacher_logp: Tensor
    q: Tensor
    generator: torch.Generator

    def signals(self) -> dict[str, Tensor]:
        return {
            "rewards": self.rewards,
            "labels": self.labels,
            "teacher_logp": self.teacher_logp,
            "q": self.q,
        }

    def arguments(self) -> dict:
        return {"mask": self.mask, "tau": self.tau, **self.signals()}

    def permuted(self, order: Tensor) -> dict:
        """The arguments with candidates reordered within each group."""
        tables = {name: values.gather(1, order) for name, values in self.signals().items() if name != "labels"}
        labels = (order == self.labels.unsqueeze(1)).to(torch.int64).argmax(1)
        return {"mask": self.mask.gather(1, order), "tau": self.tau, "labels": labels, **tables}

    @property
    def real(self) -> Tensor:
        return self.mask.any(1)


@st.composite
def groups(draw, min_k: int = 1, max_k: int = 6, max_groups: int = 4, ragged: bool | None = None) -> Groups:
    """Groups of random size, spread of log-probabilities, ties among rewards, and padding.

    Of more than four groups each has a spread and ties of its own.
    """
    count, k = draw(st.integers(1, max_groups)), draw(st.integers(min_k, max_k))
    spread = draw(st.sampled_from(SPREADS))
    levels = draw(st.sampled_from([2, 3, None]))
    masked = draw(st.booleans()) if ragged is None else ragged
    tau = draw(st.sampled_from([0.3, 1.0, 2.5]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.ones(count, k, dtype=torch.bool)
    if masked:
        mask = torch.rand(count, k, generator=generator) < 0.7
    rewards = normal(count, k)
    if levels is not None:
        rewards = torch.randint(levels, (count, k), generator=generator).to(torch.float64)
    if count > 4:
        chosen = torch.randint(len(SPREADS), (count, 1), generator=generator)
        spread = torch.tensor(SPREADS, dtype=torch.float64)[chosen]
        rewards = torch.where(torch.rand(count, 1, generator=generator) < 0.5, normal(count, k), rewards)
    q = torch.softmax(torch.where(mask | ~mask.any(1, keepdim=True), normal(count, k), -torch.inf), 1)
    return Groups(
        logp=spread * normal(count, k),
        anchor_logp=spread * normal(count, k),
        mask=mask,
        tau=tau,
        rewards=rewards,
        labels=mask.to(torch.int64).argmax(1),
        teacher_logp=normal(count, k),
        q=q,
        generator=generator,
    )
