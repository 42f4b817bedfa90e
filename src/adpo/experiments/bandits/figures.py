"""The paper's Figure 2 and the sensitivity map, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from adpo.experiments.bandits.jobs import SENSITIVITY
from adpo.experiments.bandits.studies import COLLAPSED
from adpo.experiments.bandits.summary import Records, final_values, methods_in, scenarios_in
from adpo.experiments.pictures import save
from adpo.experiments.statistics import Interval, interval


def robustness(summary: dict[str, Any], folder: Path) -> None:
    """Figure 2(a): WinMass of every method in every scenario, with 95 % intervals."""
    columns = [name for name in next(iter(summary["sampled"].values())) if name != "all"]
    kinds = list(dict.fromkeys(name.split("-")[0] for name in columns))
    figure, axes = plt.subplots(
        2, len(kinds), figsize=(4 * len(kinds), 9), sharex="col", sharey="row", squeeze=False
    )
    for row, metric in zip(axes, ("sampled", "greedy"), strict=True):
        for axis, kind in zip(row, kinds, strict=True):
            names = [name for name in columns if name.startswith(f"{kind}-")]
            for i, (method, cells) in enumerate(summary[metric].items()):
                places = [x + (i - len(summary[metric]) / 2) * 0.025 for x in range(len(names))]
                _points(axis, places, [Interval(*cells[name]) for name in names], method, i, **_style(method))
            axis.set_xticks(range(len(names)), [name.split("-")[1] for name in names])
            axis.set_title(f"{kind}, {metric}")
        row[0].set_ylabel(f"WinMass, {metric}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), ncols=6, fontsize=8, loc="lower center")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    save(figure, folder, "robustness", bbox_inches="tight")


def _style(method: str) -> dict[str, Any]:
    """Our methods in full lines, baselines dashed; the two that lead stand out."""
    line = "-" if method.startswith("adpo") else ":" if method == "reference" else "--"
    colour = {"adpo-natural": "black", "trpo": "crimson"}.get(method)
    return {"line": line, "width": 2.5 if colour else 1.0, "colour": colour}


def capacity(results: dict[int, Records], folder: Path) -> None:
    """Figure 2(b): WinMass against the width of the policy, for both readings of heavy noise."""
    names = scenarios_in(next(iter(results.values())))
    widths = sorted(results)
    figure, axes = plt.subplots(1, len(names), figsize=(6 * len(names), 4.5), sharey=True, squeeze=False)
    for axis, scenario in zip(axes[0], names, strict=True):
        for i, method in enumerate(methods_in(next(iter(results.values())))):
            runs = [results[width] for width in widths]
            found = [interval(final_values(records, scenario, method, "sampled")) for records in runs]
            _points(axis, widths, found, method, i, **_style(method))
        axis.set_xscale("log", base=2)
        axis.set_xticks(widths, [str(w) for w in widths])
        axis.set_xlabel("hidden units")
        axis.set_title(scenario)
    axes[0][0].set_ylabel("WinMass, sampled")
    axes[0][-1].legend(fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
    save(figure, folder, "capacity", bbox_inches="tight")


def popular(results: dict[str, Records], folder: Path) -> None:
    """Mass left on popular but wrong items, mass smeared, and steps to suppress, by the reference's mass."""
    measures = {"wrong": "mass on wrong items", "smeared": "mass on the rest", "steps": "steps to suppress"}
    kinds = list(dict.fromkeys(name.split("-")[0] for name in results))
    figure, axes = plt.subplots(len(kinds), len(measures), figsize=(14, 4 * len(kinds)), squeeze=False)
    for row, kind in zip(axes, kinds, strict=True):
        masses = [float(name.split("-")[1]) for name in results if name.startswith(kind)]
        for axis, (measure, title) in zip(row, measures.items(), strict=True):
            for i, method in enumerate(methods_in(results[f"{kind}-{masses[0]}"])):
                found = [
                    interval([r[measure] for r in results[f"{kind}-{mass}"] if r["method"] == method])
                    for mass in masses
                ]
                _points(axis, masses, found, method, i)
            axis.set_xlabel(f"reference mass on {kind} items")
            axis.set_title(title)
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    save(figure, folder, "popular", bbox_inches="tight")


def divergences(records: Records, folder: Path) -> None:
    """WinMass, entropy and the share of collapsed runs under each divergence."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    names = [method for method in methods_in(records) if method != "reference"]
    scenarios = scenarios_in(records)
    for axis, measure in zip(axes, ("sampled", "entropy", "collapsed"), strict=True):
        for i, method in enumerate(names):
            found = []
            for scenario in scenarios:
                values = final_values(records, scenario, method, "entropy" if measure == "collapsed" else measure)
                found.append(
                    interval([float(v < COLLAPSED) for v in values] if measure == "collapsed" else values)
                )
            _points(axis, [x + 0.1 * i for x in range(len(scenarios))], found, method, i, line="")
        axis.set_xticks(range(len(scenarios)), scenarios, rotation=20)
        axis.set_title(
            {"sampled": "WinMass, sampled", "entropy": "entropy", "collapsed": "collapsed runs"}[measure]
        )
    axes[0].legend(fontsize=7)
    axes[2].set_ylim(-0.05, 1.05)
    save(figure, folder, "divergences", bbox_inches="tight")


def variance(results: dict[str, Records], folder: Path) -> None:
    """Trace of the gradient's covariance over resampled groups, relative to the squared mean gradient."""
    figure, axis = plt.subplots(figsize=(9, 4))
    names = list(dict.fromkeys(r["estimator"] for r in next(iter(results.values()))))
    for i, (moment, records) in enumerate(results.items()):
        found = [interval([r["relative"] for r in records if r["estimator"] == name]) for name in names]
        _points(axis, [x + 0.15 * i for x in range(len(names))], found, moment, i, line="")
    axis.set_xticks(range(len(names)), names, rotation=15)
    axis.set_yscale("log")
    axis.set_ylabel("noise / signal")
    axis.legend()
    save(figure, folder, "variance", bbox_inches="tight")


def _points(
    axis: Axes,
    x: list[Any],
    found: list[Interval],
    label: str,
    i: int,
    line: str = "-",
    width: float = 1.5,
    colour: str | None = None,
) -> None:
    means, halves = [f.mean for f in found], [f.half for f in found]
    shade = colour or plt.get_cmap("tab20")(i % 20)
    axis.errorbar(x, means, halves, label=label, color=shade, capsize=2, marker="o", ms=4, ls=line, lw=width)
    axis.grid(visible=True, alpha=0.3)


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
    save(figure, folder, "sensitivity", bbox_inches="tight")


def _mean(records: Records, tau: float, beta: float, metric: str) -> float:
    chosen = [r["curve"][-1][metric] for r in records if r["settings"] == {"beta": beta, "tau": tau}]
    return float(sum(chosen) / len(chosen))
