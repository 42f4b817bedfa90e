"""Learning curves, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from adpo.experiments.pictures import save


def draw(results: dict[str, Any], folder: Path) -> None:
    """Accuracy on watched problems, and reward, by rollouts: a line for each method, its seeds thin behind it."""
    runs = [run for run in results["runs"] if run["trial"]["study"] == "seeds"]
    if not runs:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    methods = list(dict.fromkeys(run["trial"]["method"] for run in runs))
    for number, method in enumerate(methods):
        mine = [run for run in runs if run["trial"]["method"] == method]
        curves = [
            ([0, *(at for at, _ in run["curve"])], [*_watched(results), *(v for _, v in run["curve"])])
            for run in mine
        ]
        rewards = [
            (range(1, len(run["rollouts"]) + 1), [each["right"] for each in run["rollouts"]]) for run in mine
        ]
        for axis, lines in ((left, curves), (right, rewards)):
            for at, values in lines:
                axis.plot(at, values, color=f"C{number}", alpha=0.25, linewidth=0.8)
            shortest = min(len(values) for _, values in lines)
            means = [sum(values[i] for _, values in lines) / len(lines) for i in range(shortest)]
            axis.plot(list(lines[0][0])[:shortest], means, color=f"C{number}", label=method)
    left.set_ylabel("accuracy on held-out problems")
    right.set_ylabel("share of right completions in a rollout")
    for axis in (left, right):
        axis.set_xlabel("rollouts")
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    save(figure, folder, "curves")


def _watched(results: dict[str, Any]) -> list[float]:
    return [results["start"]["watched"]]
