"""Which settings are tried, and between which bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Range(NamedTuple):
    """From a low to a high value; ``log``: evenly over its logarithm."""

    low: float
    high: float
    log: bool = True

    def suggested(self, trial: Any, name: str) -> float:
        """By an Optuna trial, with as many digits as one would type."""
        return float(f"{trial.suggest_float(name, self.low, self.high, log=self.log):.3g}")


RATES = {"train": Range(3e-5, 1e-3), "prefer": Range(3e-5, 3e-3)}
"""Of the embedded model; for others, bounds are given by ``--range``."""
TAU = Range(0.05, 5.0)
SCHEDULES: dict[str, dict[str, Range]] = {
    "constant": {"tau": TAU},
    "auto": {},
    "guarded": {"tau_min": Range(0.05, 0.5), "tau_max": Range(0.5, 5.0)},
    "hybrid": {
        "tau": TAU,
        "tau_entropy_weight": Range(0.0, 1.0, log=False),
        "tau_reward_weight": Range(0.0, 1.0, log=False),
    },
}
"""What there is to choose about tau."""
WITH_BETA = ("boltzmann", "kde")
"""Targets with a temperature of the rewards."""
CLIPS = {"grpo": Range(0.03, 0.5), "dr_grpo": Range(0.03, 0.5), "gspo": Range(1e-4, 0.3)}
"""What there is to choose about the methods of TRL: epsilon."""


def space(
    job: str, typed: Mapping[str, Any], ranges: Sequence[str], in_file: Mapping[str, Any] | None = None
) -> dict[str, Range]:
    """Of a job with these settings; what is given has been chosen already, ranges of the user come last.

    A range may be of a setting that stands in a file, as what is typed comes before what a file says.

    >>> sorted(space("train", {"tau": "0.5"}, ["nll_weight=0:0.3"]))
    ['learning_rate', 'nll_weight', 'reward_beta']
    """
    given = {**(in_file or {}), **typed}
    schedule = str(given.get("tau_schedule", "auto" if given.get("tau") == "auto" else "constant"))
    target = str(given.get("target", "boltzmann" if job == "train" else "plackett_luce"))
    method = str(given.get("method", "adpo"))
    if method in CLIPS:
        found = {"learning_rate": RATES[job], "epsilon": CLIPS[method]}
    else:
        found = {"learning_rate": RATES[job], **SCHEDULES.get(schedule, {})}
        if target in WITH_BETA:
            found["reward_beta"] = Range(0.2, 5.0)
    return with_ranges({name: bounds for name, bounds in found.items() if name not in given}, typed, ranges)


def with_ranges(space: Mapping[str, Range], typed: Mapping[str, Any], ranges: Sequence[str]) -> dict[str, Range]:
    """What is tried, with the ranges that a user gave."""
    found = dict(space)
    for words in ranges:
        name, bounds = parsed(words)
        if name in typed:
            raise ValueError(f"--range {name} and --{name} {typed[name]}: give one of them")
        found[name] = bounds
    if not found:
        raise ValueError("there is nothing left to choose: give a --range")
    return found


def parsed(words: str) -> tuple[str, Range]:
    """``name=low:high``, over the logarithm where both are positive; ``name=low:high:even`` where not.

    >>> parsed("tau=0.1:1"), parsed("tau=0.1:1:even")
    (('tau', Range(low=0.1, high=1.0, log=True)), ('tau', Range(low=0.1, high=1.0, log=False)))
    """
    name, _, bounds = words.partition("=")
    parts = bounds.split(":")
    even = len(parts) == 3 and parts.pop() == "even"
    try:
        low, high = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"--range {words}: expected name=low:high, or name=low:high:even") from None
    if not (name and math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"--range {words}: expected name=low:high with low below high")
    return name.strip().replace("-", "_"), Range(low, high, log=low > 0 and not even)
