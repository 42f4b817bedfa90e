"""Learning curves, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from adpo.experiments.pictures import save
from adpo.experiments.rows import Rows, grouped, where


def draw(results: dict[str, Any], folder: Path) -> None:
    """Accuracy on watched problems, reward and length by rollouts: a line a method, its seeds thin behind it.

    Of known runs no curves are kept, so that these are not among the seeds.
    """
    runs = [{**run, **run["trial"]} for run in results["runs"] if "known" not in run]
    by_method = grouped(where(runs, study="seeds"), "method")
    if not by_method:
        return
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5))
    for number, (method, mine) in enumerate(by_method.items()):
        begun = (0, results["start"]["watched"])
        watched = [list(zip(*(begun, *run["curve"]), strict=True)) for run in mine]
        for axis, lines in zip(
            axes, (watched, _by_rollout(mine, "right"), _by_rollout(mine, "length")), strict=True
        ):
            for at, values in lines:
                axis.plot(at, values, color=f"C{number}", alpha=0.25, linewidth=0.8)
            shortest = min(len(values) for _, values in lines)
            means = [sum(values[i] for _, values in lines) / len(lines) for i in range(shortest)]
            axis.plot(lines[0][0][:shortest], means, color=f"C{number}", label=f"{method}, {len(mine)} seeds")
    shown = ("accuracy on watched problems", "share of right completions in a rollout", "tokens a completion")
    for axis, label in zip(axes, shown, strict=True):
        axis.set_ylabel(label)
        axis.set_xlabel("rollouts")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    save(figure, folder, "curves")


def _by_rollout(runs: Rows, measure: str) -> list[Any]:
    return [(range(1, len(run["rollouts"]) + 1), [each[measure] for each in run["rollouts"]]) for run in runs]
