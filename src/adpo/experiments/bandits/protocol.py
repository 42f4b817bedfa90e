"""The protocol: every number of the experiment, and the twelve scenarios.

A world is a random reward function of a context (one tanh layer) for each of the items. The learner never sees
clean rewards: each iteration brings fresh contexts, for each a list of distinct items drawn uniformly, and
corrupted rewards of the listed items. Methods that learn from their own samples draw as many items from their
policy instead, and see rewards corrupted in the same way. Policies are evaluated on clean, unshifted test
contexts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """Sizes, steps and rates; shared by all methods."""

    dimensions: int = 20  # of a context
    items: int = 10
    listed: int = 6  # items whose corrupted rewards are seen per context
    world_units: int = 32  # width of the reward function
    hidden: int = 64  # width of the policy's two layers
    contexts: int = 64  # per iteration
    iterations: int = 200
    inner_steps: int = 4  # optimizer steps on each iteration's data
    learning_rate: float = 5e-4  # AdamW
    weight_decay: float = 0.01
    reference_steps: int = 30  # of supervised pre-training on clean best items
    test_contexts: int = 1000
    held_out_lists: int = 1000  # noisy lists on which the calibrated sharpness is chosen
    evaluate_every: int = 20  # iterations between points of the curve


@dataclass(frozen=True)
class Scenario:
    """How training data are corrupted; zero everywhere is clean."""

    corruption: str
    level: str
    noise: float = 0.0  # standard deviation of Gaussian noise on every observed reward
    outliers: float = 0.0  # probability that a reward's noise is ten times larger
    shift: float = 0.0  # of the training contexts, along one random direction per world
    scale: float = 1.0  # of the training contexts
    flips: float = 0.0  # probability that all rewards of a list change sign
    cauchy: float = 0.0  # scale of Cauchy noise

    @property
    def name(self) -> str:
        return f"{self.corruption}-{self.level}"


LEVELS = ("easy", "medium", "hard")


def _levels(corruption: str, **values: tuple[float, float, float]) -> tuple[Scenario, ...]:
    return tuple(
        Scenario(corruption, level, **{name: value[i] for name, value in values.items()})
        for i, level in enumerate(LEVELS)
    )


SCENARIOS: tuple[Scenario, ...] = (
    *_levels("gaussian", noise=(0.5, 1.0, 2.0), outliers=(0.05, 0.1, 0.2)),
    *_levels("shift", noise=(0.5, 0.5, 0.5), shift=(1.0, 2.0, 3.0), scale=(0.9, 0.75, 0.6)),
    *_levels("flips", noise=(0.5, 0.5, 0.5), flips=(0.1, 0.2, 0.3)),
    *_levels("cauchy", cauchy=(0.3, 0.7, 1.5)),
)
MEDIUM = {scenario.corruption: scenario for scenario in SCENARIOS if scenario.level == "medium"}
CLEAN = Scenario("clean", "none")
UNLEARNABLE = Scenario("flips", "half", flips=0.5)
