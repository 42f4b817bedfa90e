"""The coordinates of the equation as arguments of a trainer: target, divergence, temperature, anchor.

A dataclass to be mixed into a trainer's own arguments, so that online and offline training say them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import ClassVar

import adpo
from adpo.core.divergences import Divergence
from adpo.core.objective import Objective
from adpo.core.targets import Target
from adpo.core.temperature import ConstantTau, GuardedTau, HybridTau, Temperature
from adpo.trainers.monitors.auto_tau import AutoTau

TARGETS = ("boltzmann", "kde", "plackett_luce", "top1")
DIVERGENCES = ("cross_entropy", "forward_kl", "reverse_kl", "alpha", "wasserstein")
SCHEDULES = ("constant", "auto", "guarded", "hybrid")
REDUCTIONS = ("sum", "mean")


@dataclass
class Coordinates:
    """What the core is told."""

    ANCHORS: ClassVar[Sequence[str]] = ()  # those the trainer knows

    target: str = field(
        default="boltzmann", metadata={"help": "Target Q: boltzmann, kde, plackett_luce (ties included) or top1."}
    )
    reward_beta: float = field(
        default=1.0, metadata={"help": "Temperature of the rewards in the boltzmann and kde targets."}
    )
    standardize: bool = field(
        default=True, metadata={"help": "Boltzmann: z-score the rewards of a group, as Algorithm 1 does."}
    )
    prior_in_target: bool = field(
        default=False,
        metadata={"help": "Boltzmann: put the anchor's probabilities inside the target, where they count twice."},
    )
    ties: str = field(default="efron", metadata={"help": "Plackett-Luce: efron or breslow."})
    label_smoothing: float = field(
        default=0.0, metadata={"help": "Plackett-Luce and top1: share of the target spread evenly."}
    )
    divergence: str = field(
        default="cross_entropy",
        metadata={"help": "D: cross_entropy, forward_kl, reverse_kl, alpha:0.5 or the like, wasserstein:1."},
    )
    tau: float = field(
        default=1.0,
        metadata={"help": 'Anchoring temperature (the base of a schedule); "auto" is tau_schedule = auto.'},
    )
    tau_schedule: str = field(
        default="constant",
        metadata={"help": "constant, auto (u after a first step has deviation 1), guarded or hybrid."},
    )
    tau_min: float = field(default=0.1, metadata={"help": "Lower bound of a schedule."})
    tau_max: float = field(default=10.0, metadata={"help": "Upper bound of a schedule."})
    tau_entropy_weight: float = field(default=0.2, metadata={"help": "Hybrid schedule: weight of confidence."})
    tau_reward_weight: float = field(default=0.5, metadata={"help": "Hybrid schedule: weight of a low reward."})
    anchor: str = field(default="fixed", metadata={"help": "The policy u is measured from."})
    anchor_decay: float = field(default=0.99, metadata={"help": "EMA anchor: decay per optimizer step."})
    anchor_every: int = field(default=50, metadata={"help": "Refresh anchor: optimizer steps between refreshes."})
    logp_reduction: str = field(
        default="sum", metadata={"help": "Log-probability of a completion: sum of its tokens', or their mean."}
    )
    nll_weight: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the negative log-likelihood of each group's best members: the loss of a group "
            "leaves their common mass free, this holds it."
        },
    )
    max_refused_steps: int = field(
        default=5,
        metadata={"help": "Steps with a gradient that is not finite, or failures of a reward function, in a row."},
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Dropout would move u away from zero where policy and anchor are equal."}
    )

    def check_coordinates(self) -> None:
        """To be called once all arguments are there."""
        if str(self.tau) == "auto":
            self.tau, self.tau_schedule = 1.0, "auto"
        choose("target", self.target, TARGETS)
        choose("anchor", self.anchor, self.ANCHORS)
        choose("tau_schedule", self.tau_schedule, SCHEDULES)
        choose("logp_reduction", self.logp_reduction, REDUCTIONS)
        choose("ties", self.ties, ("efron", "breslow"))
        if self.label_smoothing and self.target in ("boltzmann", "kde"):
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} means nothing to the {self.target} target; "
                "leave it at 0, or raise reward_beta for a flatter target"
            )
        if self.prior_in_target and self.target != "boltzmann":
            raise ValueError(f"prior_in_target means nothing to the {self.target} target; leave it out")
        for name, wrong in {
            "nll_weight": self.nll_weight < 0,
            "max_refused_steps": self.max_refused_steps < 1,
        }.items():
            if wrong:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        self.objective()
        self.temperature_schedule()

    def objective(self) -> Objective:
        """The objective these arguments describe."""
        targets: dict[str, Target] = {
            "boltzmann": adpo.boltzmann(self.reward_beta, self.standardize, self.prior_in_target),
            "kde": adpo.kde(self.reward_beta),
            "plackett_luce": adpo.plackett_luce(
                ties="breslow" if self.ties == "breslow" else "efron", label_smoothing=self.label_smoothing
            ),
            "top1": adpo.top1(label_smoothing=self.label_smoothing),
        }
        return Objective(targets[self.target], parse_divergence(self.divergence), self.tau)

    def temperature_schedule(self) -> Temperature:
        """How tau moves."""
        if self.tau_schedule == "auto":
            return AutoTau(self.tau)
        if self.tau_schedule == "guarded":
            return GuardedTau(self.tau_min, self.tau_max)
        if self.tau_schedule == "hybrid":
            return HybridTau(
                self.tau,
                entropy_weight=self.tau_entropy_weight,
                reward_weight=self.tau_reward_weight,
                tau_min=self.tau_min,
                tau_max=self.tau_max,
            )
        return ConstantTau(self.tau)


def parse_divergence(text: str) -> Divergence:
    """``alpha:0.5`` and the like.

    >>> str(parse_divergence("alpha:0.5"))
    'alpha(0.5)'
    """
    name, _, number = text.partition(":")
    choose("divergence", name, DIVERGENCES)
    if name in ("alpha", "wasserstein"):
        try:
            value = float(number)
        except ValueError:
            raise ValueError(f"divergence {text!r} lacks its number: write {name}:0.5 or the like") from None
        return adpo.divergences.alpha(value) if name == "alpha" else adpo.wasserstein(value)
    if number:
        raise ValueError(f"divergence {name} takes no number; got {text!r}")
    found: Divergence = {
        "cross_entropy": adpo.cross_entropy,
        "forward_kl": adpo.forward_kl,
        "reverse_kl": adpo.reverse_kl,
    }[name]
    return found


def choose(name: str, value: str, allowed: Sequence[str]) -> None:
    """Complain about a value that is none of those allowed."""
    if value not in allowed:
        close = get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{hint}")
