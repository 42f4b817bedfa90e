"""The paper's Figure 2 and the sensitivity map, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from adpo.experiments.bandits.jobs import SENSITIVITY
from adpo.experiments.bandits.statistics import interval
from adpo.experiments.bandits.summary import Records, final_values, methods_in

mpl.rcParams["svg.hashsalt"] = "adpo"  # the same figure gives the same file


def save(figure: Figure, folder: Path, name: str) -> None:
    for ending in ("svg", "png"):
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(folder / f"{name}.{ending}", dpi=150, bbox_inches="tight", metadata=metadata)
    plt.close(figure)


def robustness(summary: dict[str, Any], folder: Path) -> None:
    """Figure 2(a): WinMass of every method in every scenario, with 95 % intervals."""
    figure, axes = plt.subplots(2, 1, figsize=(13, 9), sharex=True)
    for axis, metric in zip(axes, ("sampled", "greedy"), strict=True):
        rows = summary[metric]
        columns = [name for name in next(iter(rows.values())) if name != "all"]
        width = 0.8 / len(rows)
        for i, (method, cells) in enumerate(rows.items()):
            places = [c + (i - len(rows) / 2) * width for c in range(len(columns))]
            means, halves = zip(*(cells[c] for c in columns), strict=True)
            colour = plt.get_cmap("tab20")(i % 20)
            axis.bar(places, means, width, yerr=halves, label=method, color=colour, error_kw={"lw": 0.6})
        axis.set_ylabel(f"WinMass, {metric}")
        axis.grid(axis="y", alpha=0.3)
        axis.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes[0].legend(ncols=6, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.25))
    save(figure, folder, "robustness")


def capacity(results: dict[str, Records], folder: Path) -> None:
    """Figure 2(b): WinMass against the width of the policy, for both readings of heavy noise."""
    names = sorted({cell.split("-", 2)[2] for cell in results})
    figure, axes = plt.subplots(1, len(names), figsize=(6 * len(names), 4.5), sharey=True, squeeze=False)
    for axis, scenario in zip(axes[0], names, strict=True):
        widths = sorted({int(cell.split("-")[1]) for cell in results})
        for i, method in enumerate(methods_in(next(iter(results.values())))):
            found = [
                interval(final_values(results[f"capacity-{w}-{scenario}"], scenario, method, "sampled"))
                for w in widths
            ]
            axis.errorbar(
                widths,
                [f.mean for f in found],
                [f.half for f in found],
                label=method,
                color=plt.get_cmap("tab20")(i % 20),
                capsize=2,
                marker="o",
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(widths, [str(w) for w in widths])
        axis.set_xlabel("hidden units")
        axis.set_title(scenario)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("WinMass, sampled")
    axes[0][-1].legend(fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
    save(figure, folder, "capacity")


def sensitivity(records: Records, folder: Path) -> None:
    """WinMass over tau and beta, sampled and greedy: sharpness moves the one far more than the other."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for axis, metric in zip(axes, ("sampled", "greedy"), strict=True):
        grid = [[_mean(records, tau, beta, metric) for beta in SENSITIVITY["beta"]] for tau in SENSITIVITY["tau"]]
        image = axis.imshow(grid, origin="lower", aspect="auto", cmap="viridis")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", color="white", fontsize=8)
        axis.set_xticks(range(len(SENSITIVITY["beta"])), [str(b) for b in SENSITIVITY["beta"]])
        axis.set_yticks(range(len(SENSITIVITY["tau"])), [str(t) for t in SENSITIVITY["tau"]])
        axis.set_xlabel("beta")
        axis.set_ylabel("tau")
        axis.set_title(f"WinMass, {metric}")
        figure.colorbar(image, ax=axis)
    save(figure, folder, "sensitivity")


def _mean(records: Records, tau: float, beta: float, metric: str) -> float:
    chosen = [r["curve"][-1][metric] for r in records if r["settings"] == {"beta": beta, "tau": tau}]
    return float(sum(chosen) / len(chosen))
