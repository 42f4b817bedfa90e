"""The protocol: what is run, in which order.

Every method starts from the same weights, sees the same problems in the same order, samples as many completions,
takes as many optimizer steps, and has the same learning rates and as many settings of its own to choose from.
Several steps are taken on a rollout: with one, a policy never leaves its on-policy anchor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from adpo.experiments.reasoning.methods import METHODS, Settings
from adpo.experiments.reasoning.variants import Variant
from adpo.experiments.seeds import seeds_from

FURTHER = 3.0
"""From a learning rate to the next, where the best is the first or the last of those that were tried."""


@dataclass(frozen=True)
class Trial:
    """One training run."""

    study: str
    method: str
    rate: float
    seed: int
    rollouts: int
    inner: int = 4  # optimizer steps on a rollout
    reward: str = "correct"
    sharpened: float = 1.0  # factor on the logits of the start: a policy that is sure of everything
    more: Settings = ()  # what is chosen for the method, and what the study changes

    @property
    def name(self) -> str:
        return named(self.study, self.method, self.rate, self.seed, self.inner, self.changes)

    @property
    def changes(self) -> str:
        """What is unlike the reported trials, beside rate and inner steps."""
        rewarded = "" if self.reward == "correct" else f", {self.reward} reward"
        sharpened = "" if self.sharpened == 1 else f", logits times {self.sharpened:g}"
        return rewarded + sharpened + "".join(f", {key} {value}" for key, value in self.more)

    def told(self) -> dict[str, Any]:
        """As results have it."""
        names = ("study", "method", "rate", "seed", "inner", "reward", "changes")
        return {**{name: getattr(self, name) for name in names}, "more": dict(self.more)}


def named(study: str, method: str, rate: float, seed: int, inner: int, changes: str) -> str:
    """What a trial is known by, in its job and in lists of runs."""
    return f"{study}-{method}-{rate:g}-seed{seed}-inner{inner}{changes}"


class Choice(NamedTuple):
    """What a method is at its best with."""

    rate: float
    more: Settings = ()

    def trial(self, study: str, method: str, rollouts: int, inner: int) -> Trial:
        return Trial(study, method, self.rate, 1, rollouts, inner, more=self.more)


LISTED = (
    *("methods", "seeds", "first_seed", "repeats", "inners", "wider", "controls", "variants", "variant_seeds"),
    *("mean_tau", "alone", "kept_every"),
)
"""What says which trials there are and when they are kept, and nothing of what a trial is."""


@dataclass(frozen=True)
class Files:
    """Of the data folder; or splits of a data set that `datasets` knows by name, called as the files are."""

    train: str
    exams: tuple[tuple[str, str, int], ...]  # name, file, problems at most; the first is the one that is reported
    levels: tuple[int, ...] | None = None
    named: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        return (self.train, *(file for _, file, _ in self.exams))


@dataclass(frozen=True)
class Preset:
    """Sizes, rates and studies."""

    start: str  # embedded, smollm2, or a name or folder for transformers
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: int
    groups: int  # in a rollout
    members: int
    longest: int  # tokens of a completion in training
    rollouts: int  # of a reported run
    short: int  # rollouts of a run that chooses the learning rate
    watched: int  # held-out problems of the learning curve
    examined: int  # of each exam, by their most likely answers
    sampled: int  # of each exam, by several sampled answers
    exam_samples: int = 8
    exam_longest: int | None = None  # tokens of a completion in exams, if others than in training
    exam_batch: int = 256
    watch_every: int = 10  # rollouts
    kept_every: int | None = None  # rollouts; what takes hours goes on from there when it was stopped
    inner: int = 4
    mini_batches: int = 1  # at most, of a rollout; further steps are further passes over it
    compiled: bool = False  # layers and sampling: takes longer than it saves where a run is short
    tuned: bool = False  # settings of the methods are chosen at every rate, not at the best alone
    inners: tuple[int, ...] = ()
    wider: tuple[float, ...] = ()  # factors on each method's best rate
    controls: tuple[str, ...] = ()  # rewards that say nothing
    variants: tuple[Variant, ...] = ()
    variant_seeds: int = 3
    mean_tau: float = 0.1  # means are smaller than sums, and so is what they differ by
    alone: tuple[str, ...] = ()  # methods whose reported runs are all that is run of them
    first_seed: int = 1  # of reported runs; seed 0 chooses rates and settings
    repeats: int = 1  # seeds of the studies of steps on a rollout, rewards that say nothing, and means
    temperature: float = 1.0
    task: str = "arithmetic"  # of the embedded model
    level: int = 2
    files: Files | None = None  # of other models
    chat: Settings = ()  # arguments of their chat template
    warmed: float = 0.5  # share of the training problems that the start is taught instead

    @property
    def exams(self) -> tuple[str, ...]:
        """Their names; the first is the one that is reported."""
        return (self.task,) if self.files is None else tuple(name for name, _, _ in self.files.exams)

    @property
    def longest_in_exams(self) -> int:
        return self.exam_longest or self.longest

    def described(self) -> dict[str, Any]:
        """What a trial depends on: results of more methods, seeds or studies may join those that are there."""
        told = {name: value for name, value in asdict(self).items() if name not in LISTED}
        if told["files"] is not None:
            told["files"].pop("named")  # what is read is told apart
        later = {"chat": bool(self.chat), "task": self.task != "arithmetic"}  # what earlier jobs do not have
        return {name: value for name, value in told.items() if later.get(name, True)}

    def studies(self) -> tuple[str, ...]:
        """All that is run beside the choice of rates and settings."""
        best = dict.fromkeys(self.methods, Choice(self.rates[0]))
        return tuple(dict.fromkeys(trial.study for trial in (*self.reported(best), *self.beside(best))))

    def choosing(self) -> Iterator[Trial]:
        """One seed for each learning rate and setting."""
        for rate, method in product(self.rates, self.methods):
            for more in METHODS[method].settings if self.tuned else METHODS[method].settings[:1]:
                yield Trial("rates", method, rate, 0, self.short, self.inner, more=more)

    def further(self, best: dict[str, Choice], tried: dict[str, set[float]]) -> Iterator[Trial]:
        """The next rate for methods that are best at the first or the last of theirs."""
        for method, (rate, more) in best.items():
            beyond = {max(tried[method]): rate * FURTHER, min(tried[method]): rate / FURTHER}
            if rate in beyond and len(tried[method]) > 1:
                yield Trial("rates", method, float(f"{beyond[rate]:.2g}"), 0, self.short, self.inner, more=more)

    def settings(self, best: dict[str, Choice]) -> Iterator[Trial]:
        """Every method's other settings at its best rate, where they were not tried with all."""
        for method, (rate, more) in best.items():
            for other in METHODS[method].settings if not self.tuned else ():
                if other != more:
                    yield Trial("rates", method, rate, 0, self.short, self.inner, more=other)

    def reported(self, best: dict[str, Choice]) -> Iterator[Trial]:
        """Each method at its own best; other seeds than those that chose it. A seed of everyone at a time."""
        for seed in seeds_from(self.first_seed, self.seeds):
            for method in self.methods:
                trial = best[method].trial("seeds", method, self.rollouts, self.inner)
                yield replace(trial, seed=seed)

    def beside(self, best: dict[str, Choice]) -> Iterator[Trial]:
        """Other numbers of steps on a rollout, larger rates, variants, rewards that say nothing, and means."""
        first = self.first_seed
        repeats, methods = (
            seeds_from(first, self.repeats),
            [each for each in self.methods if each not in self.alone],
        )
        for seed, method in product(repeats, methods):
            base = replace(best[method].trial("inner", method, self.rollouts, self.inner), seed=seed)
            yield from (replace(base, inner=inner) for inner in self.inners if inner != self.inner)
        for factor, method, seed in product(self.wider, methods, (first, first + 1)):
            base = best[method].trial("range", method, self.rollouts, self.inner)
            yield replace(base, rate=float(f"{factor * base.rate:.3g}"), seed=seed)
        for variant in self.variants:
            for method in (each for each in variant.methods if each in methods):
                base = best[method].trial(variant.study, method, self.rollouts, self.inner)
                more = {**dict(base.more), **dict(variant.more)}
                rate = float(f"{variant.times * base.rate:.3g}")
                base = replace(base, rate=rate, reward=variant.reward, sharpened=variant.sharpened)
                base = replace(base, more=tuple(more.items()))
                yield from (replace(base, seed=seed) for seed in seeds_from(first, self.variant_seeds))
        for seed, method in product(repeats, methods):
            base = replace(best[method].trial("control", method, self.rollouts, self.inner), seed=seed)
            yield from (replace(base, reward=reward) for reward in self.controls)
        ours = [each for each in methods if self.inners and METHODS[each].trainer == "adpo"]
        for seed, method in product(repeats, ours):
            base = replace(best[method].trial("mean", method, self.rollouts, self.inner), seed=seed)
            mean = {**dict(base.more), "logp_reduction": "mean", "tau": self.mean_tau}
            yield replace(base, more=tuple(mean.items()))
