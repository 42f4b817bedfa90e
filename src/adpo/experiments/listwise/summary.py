"""From the finished runs to figures: means with bootstrap intervals, and differences from the two kinds of DPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adpo.experiments.listwise.measure import MEASURES
from adpo.experiments.listwise.methods import METHODS, SCORES
from adpo.experiments.rows import distinct, where

BASELINES = ("dpo-pair", "dpo-all")
DRAWS = 2000


def bootstrap(values: Tensor, draws: int = DRAWS) -> list[float]:
    """Mean and 95 % interval ``[mean, low, high]`` of ``[seeds, prompts]``; both are drawn anew, with replacement.

    A prompt on which nothing can be said is NaN, and left out.

    >>> bootstrap(torch.tensor([[1.0, torch.nan, 1.0]]))
    [1.0, 1.0, 1.0]
    """
    generator = torch.Generator().manual_seed(0)
    seeds, prompts = values.shape
    seed = torch.randint(seeds, (draws, seeds, 1), generator=generator)
    prompt = torch.randint(prompts, (draws, 1, prompts), generator=generator)
    means = values.double()[seed, prompt].nanmean((1, 2))
    low, high = means.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [round(float(values.double().nanmean()), 6), round(low, 6), round(high, 6)]


def summarise(runs: Sequence[dict[str, Any]], untrained: dict[str, Any]) -> dict[str, Any]:
    """``{method: {score: {measure: [mean, low, high]}}}``; the score "own" is the method's.

    ``untrained`` are the values of scores that need no training, ``{name: {measure: one per prompt}}``.
    """
    found: dict[str, Any] = {}
    for name, values in untrained.items():
        own = {measure: bootstrap(per_prompt([values[measure]])) for measure in MEASURES}
        found[name] = {"own": own, "mean_logp": own} if name == "reference" else {"own": own}
    for method in distinct(runs, "method"):
        scores = {score: score for score in SCORES} | {"own": METHODS[method].score}
        found[method] = {
            label: {measure: bootstrap(values_of(runs, method, score, measure)) for measure in MEASURES}
            for label, score in scores.items()
        }
    return found


def against(runs: Sequence[dict[str, Any]], baseline: str) -> dict[str, Any]:
    """Every other method less the baseline, each by its own score, paired by seed and prompt."""
    return {
        method: {
            measure: bootstrap(_own(runs, method, measure) - _own(runs, baseline, measure)) for measure in MEASURES
        }
        for method in distinct(runs, "method")
        if method != baseline
    }


def values_of(runs: Sequence[dict[str, Any]], method: str, score: str, measure: str) -> Tensor:
    """``[seeds, prompts]``, in the order of the seeds."""
    mine = sorted(where(runs, method=method), key=lambda run: int(run["seed"]))
    return per_prompt([run["measures"][score][measure] for run in mine])


def per_prompt(rows: Sequence[Sequence[float | None]]) -> Tensor:
    """A row per seed, a column per prompt; None becomes NaN."""
    return torch.tensor([[torch.nan if v is None else v for v in row] for row in rows], dtype=torch.float64)


def _own(runs: Sequence[dict[str, Any]], method: str, measure: str) -> Tensor:
    return values_of(runs, method, METHODS[method].score, measure)
