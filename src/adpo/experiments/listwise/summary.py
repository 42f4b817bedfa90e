"""From the finished runs to tables: means with bootstrap intervals, and differences from the two kinds of DPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from adpo.experiments.listwise.measure import MEASURES
from adpo.experiments.listwise.methods import METHODS, SCORES

BASELINES = ("dpo-pair", "dpo-all")
DRAWS = 2000
TITLES = {
    "pair_accuracy": "pairs in order",
    "despite_length": "of them, better not longer",
    "ndcg": "NDCG@16",
    "top1": "best first",
}


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
        own = {measure: bootstrap(table([values[measure]])) for measure in MEASURES}
        found[name] = {"own": own, "mean_logp": own} if name == "reference" else {"own": own}
    for method in methods_in(runs):
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
        for method in methods_in(runs)
        if method != baseline
    }


def methods_in(runs: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["method"] for run in runs))


def values_of(runs: Sequence[dict[str, Any]], method: str, score: str, measure: str) -> Tensor:
    """``[seeds, prompts]``, in the order of the seeds."""
    mine = sorted((run for run in runs if run["method"] == method), key=lambda run: int(run["seed"]))
    return table([run["measures"][score][measure] for run in mine])


def table(rows: Sequence[Sequence[float | None]]) -> Tensor:
    """A row per seed, a column per prompt; None becomes NaN."""
    return torch.tensor([[torch.nan if v is None else v for v in row] for row in rows], dtype=torch.float64)


def _own(runs: Sequence[dict[str, Any]], method: str, measure: str) -> Tensor:
    return values_of(runs, method, METHODS[method].score, measure)


def terminal_tables(results: dict[str, Any]) -> list[Table]:
    found = []
    for title, header, body in _tables(results):
        shown = Table(*header, title=title)
        for row in body:
            shown.add_row(*row)
        found.append(shown)
    return found


def markdown(results: dict[str, Any]) -> str:
    """All tables, as the documents quote them."""
    parts = []
    for title, header, body in _tables(results):
        lines = [header, ["---"] * len(header), *body]
        parts.append(f"### {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def _tables(results: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    names = list(TITLES.values())
    found = [
        (title, ["method", *names], _scores(results, score))
        for score, title in (
            ("own", "Held-out prompts, each method by its own score"),
            ("log_ratio", "Held-out prompts, by log-ratio to the starting model"),
            ("mean_logp", "Held-out prompts, by mean log-probability per token"),
        )
    ]
    found += [
        (f"Each method less {baseline}, paired", ["method", *names], _differences(results, cells))
        for baseline, cells in results["against"].items()
    ]
    return [*found, _settings(results)]


def _scores(results: dict[str, Any], score: str) -> list[list[str]]:
    return [
        [method, *("{:.3f} ({:.3f}–{:.3f})".format(*results["summary"][method][score][name]) for name in MEASURES)]
        for method in ("length", "reference", *results["description"]["methods"])
        if score in results["summary"][method]
    ]


def _differences(results: dict[str, Any], cells: dict[str, Any]) -> list[list[str]]:
    return [
        [method, *("{:+.3f} ({:+.3f} to {:+.3f})".format(*cells[method][name]) for name in MEASURES)]
        for method in results["description"]["methods"]
        if method in cells
    ]


def _settings(results: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    header = ["method", "strength", "learning rate", "validation", "steps", "tokens", "lists or pairs", "refused"]
    header += ["log-ratio, best", "log-ratio, all"]
    body = []
    for method in results["description"]["methods"]:
        chosen = results["settings"][method]
        mine = [run for run in results["runs"] if run["method"] == method]
        body.append(
            [
                method,
                f"{chosen['strength']:g}",
                f"{chosen['learning_rate']:g}",
                f"{chosen['validation']:.3f}",
                *(f"{_mean(mine, 'trained', key):,.0f}" for key in ("steps", "tokens", "lists")),
                f"{sum(run['trained']['refused'] for run in mine)}",
                *(f"{_mean(mine, 'drift', key):+.1f}" for key in ("best", "all")),
            ]
        )
    return "Chosen settings, work done, and how far the log-probabilities moved", header, body


def _mean(runs: Sequence[dict[str, Any]], part: str, key: str) -> float:
    return sum(float(run[part][key]) for run in runs) / len(runs)
