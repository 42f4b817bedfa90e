"""Studies beside the reported runs: other objectives, rewards, starts and steps, samples of an older policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adpo.experiments.reasoning.methods import Settings


@dataclass(frozen=True)
class Variant:
    """Another ADPO, reward, start, step or age of samples: over seeds, at what their method is best with."""

    study: str
    more: Settings = ()
    reward: str = "correct"
    sharpened: float = 1.0
    methods: tuple[str, ...] = ("ADPO",)
    times: float = 1.0  # the method's best learning rate


def _one(study: str, **arguments: Any) -> Variant:
    return Variant(study, tuple(arguments.items()))


GUARDED = (("tau_schedule", "guarded"), ("tau_min", 0.3), ("tau_max", 3.0))
GUARDED_LOW = (("tau_schedule", "guarded"), ("tau_min", 0.03), ("tau_max", 0.3))
VARIANTS = (
    *(_one("targets", target=target) for target in ("boltzmann", "kde", "plackett_luce", "top1")),
    *(_one("divergences", divergence=name) for name in ("reverse_kl", "alpha:0.5", "wasserstein:1")),
    *(_one("temperatures", tau=tau) for tau in (0.1, 0.3, 1.0, 3.0)),
    *(_one("temperatures", tau_schedule=name) for name in ("auto", "hybrid")),
    *(Variant("temperatures", bounds) for bounds in (GUARDED, GUARDED_LOW)),
    Variant("collapsed start", sharpened=4.0),
    *(Variant("collapsed start", bounds, sharpened=4.0) for bounds in (GUARDED, GUARDED_LOW)),
    Variant("collapsed start", sharpened=4.0, methods=("GRPO",)),
    *(
        Variant("hackable", (("target", target),), "hackable")
        for target in ("boltzmann", "kde", "plackett_luce", "top1")
    ),
    Variant("hackable", reward="hackable", methods=("GRPO", "GSPO", "Boltzmann, no anchor")),
    Variant("noisy", reward="noisy", methods=("ADPO", "ADPO Plackett-Luce", "GRPO", "GSPO")),
    *(
        Variant(
            "stale",  # so many batches are sampled at once: as many completions and steps in all, fewer samplings
            (("steps_per_generation", batches),),
            methods=("ADPO", "GRPO", "GSPO", "ADPO Plackett-Luce", "Boltzmann, no anchor"),
        )
        for batches in (4, 12)
    ),
    *(
        Variant("stale settings", (("steps_per_generation", batches), (name, value)), methods=(method,))
        for batches in (4, 12)
        for method, name, values in (("ADPO", "tau", (0.3, 1.0)), ("GRPO", "epsilon", (0.2, 0.4)))
        for value in values
    ),
    *(
        Variant("backtracking", (("backtracking", True),), methods=("ADPO", "GRPO", "GSPO"), times=times)
        for times in (1.0, 10.0, 30.0, 100.0)
    ),
    Variant("beyond", (("tau", 0.03),), methods=("ADPO", "ADPO Plackett-Luce")),
    Variant("beyond", (("tau", 3.0),), methods=("Boltzmann, no anchor", "Plackett-Luce, no anchor")),
    Variant("beyond", (("epsilon", 0.05),), methods=("GRPO", "Dr. GRPO")),
    Variant("beyond", (("epsilon", 1e-4), ("epsilon_high", 1.3e-4)), methods=("GSPO",)),
    Variant("beyond", (("tau", 10.0),), methods=("Boltzmann, no anchor",)),
    Variant("beyond", (("tau", 0.01),), methods=("ADPO Plackett-Luce",)),
    Variant("beyond", (("epsilon", 0.025),), methods=("Dr. GRPO",)),
    Variant("beyond", (("epsilon", 3e-5), ("epsilon_high", 4e-5)), methods=("GSPO",)),
)
"""Beyond: every method is at its best with the first or the last of the settings it has to choose from; where one
further is better by what is watched, another step is taken."""

OF_SUMS = (
    Variant("beyond", (("tau", 0.03),)),
    Variant("beyond", (("epsilon", 0.05),), methods=("GRPO", "Dr. GRPO")),
)
"""Of those with which ADPO is compared first; GSPO is at its best with the setting between the others."""

OF_WORDS = (
    Variant("hackable", reward="hackable", methods=("ADPO", "GRPO", "GSPO")),
    Variant("noisy", reward="noisy", methods=("ADPO", "GRPO", "GSPO")),
    *(
        Variant("backtracking", (("backtracking", True),), methods=("ADPO", "GRPO", "GSPO"), times=times)
        for times in (10.0, 3.0)
    ),
)
"""Where GPU time is scarce."""
