"""The paper's Figure 2 and the studies, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from adpo.experiments.bandits.jobs import SENSITIVITY
from adpo.experiments.bandits.summary import Records, by_width, divergences, joined, sensitivity
from adpo.experiments.pictures import save
from adpo.experiments.rows import Rows, column, distinct, grouped
from adpo.experiments.statistics import Interval, means

Style = dict[str, Any]


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


def _style(method: str) -> Style:
    """Our methods in full lines, baselines dashed; the two that lead stand out."""
    line = "-" if method.startswith("adpo") else ":" if method == "reference" else "--"
    colour = {"adpo-natural": "black", "trpo": "crimson"}.get(method)
    return {"line": line, "width": 2.5 if colour else 1.0, "colour": colour}


def capacity(cells: dict[str, Records], folder: Path) -> None:
    """Figure 2(b): WinMass against the width of the policy, for both readings of heavy noise."""
    scenarios = grouped(means(by_width(cells), ("scenario", "method", "hidden"), ("sampled",)), "scenario")
    figure, axes = plt.subplots(1, len(scenarios), figsize=(6 * len(scenarios), 4.5), sharey=True, squeeze=False)
    for axis, (scenario, rows) in zip(axes[0], scenarios.items(), strict=True):
        _lines(axis, grouped(rows, "method"), "hidden", "sampled", _style)
        widths = distinct(rows, "hidden")
        axis.set_xscale("log", base=2)
        axis.set_xticks(widths, [str(w) for w in widths])
        axis.set_xlabel("hidden units")
        axis.set_title(scenario)
    axes[0][0].set_ylabel("WinMass, sampled")
    axes[0][-1].legend(fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
    save(figure, folder, "capacity", bbox_inches="tight")


def popular(cells: dict[str, Records], folder: Path) -> None:
    """Mass left on popular but wrong items, mass smeared, and steps to suppress, by the reference's mass."""
    measures = {"wrong": "mass on wrong items", "smeared": "mass on the rest", "steps": "steps to suppress"}
    rows = means(joined(cells, "popular-", "reference"), ("reference", "method"), tuple(measures))
    for row in rows:
        row["kind"], mass = row["reference"].split("-")
        row["mass"] = float(mass)
    kinds = grouped(rows, "kind")
    figure, axes = plt.subplots(len(kinds), len(measures), figsize=(14, 4 * len(kinds)), squeeze=False)
    for line, (kind, of_kind) in zip(axes, kinds.items(), strict=True):
        for axis, (measure, title) in zip(line, measures.items(), strict=True):
            _lines(axis, grouped(of_kind, "method"), "mass", measure)
            axis.set_xlabel(f"reference mass on {kind} items")
            axis.set_title(title)
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    save(figure, folder, "popular", bbox_inches="tight")


def diverging(cells: dict[str, Records], folder: Path) -> None:
    """WinMass, entropy and the share of collapsed runs under each divergence."""
    titles = {"sampled": "WinMass, sampled", "entropy": "entropy", "collapsed": "collapsed runs"}
    rows = divergences(cells)
    scenarios = distinct(rows, "scenario")
    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    for axis, (measure, title) in zip(axes, titles.items(), strict=True):
        _beside(axis, grouped(rows, "method"), measure, 0.1)
        axis.set_xticks(range(len(scenarios)), scenarios, rotation=20)
        axis.set_title(title)
    axes[0].legend(fontsize=7)
    axes[2].set_ylim(-0.05, 1.05)
    save(figure, folder, "divergences", bbox_inches="tight")


def variance(cells: dict[str, Records], folder: Path) -> None:
    """Trace of the gradient's covariance over resampled groups, relative to the squared mean gradient."""
    rows = means(joined(cells, "variance-", "moment"), ("moment", "estimator"), ("relative",))
    names = distinct(rows, "estimator")
    figure, axis = plt.subplots(figsize=(9, 4))
    _beside(axis, grouped(rows, "moment"), "relative", 0.15)
    axis.set_xticks(range(len(names)), names, rotation=15)
    axis.set_yscale("log")
    axis.set_ylabel("noise / signal")
    axis.legend()
    save(figure, folder, "variance", bbox_inches="tight")


def sensitive(cells: dict[str, Records], folder: Path) -> None:
    """WinMass over tau and beta, sampled and greedy: sharpness moves the one far more than the other."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for axis, metric in zip(axes, ("sampled", "greedy"), strict=True):
        grid = sensitivity(cells["sensitivity"], metric)
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


def _lines(
    axis: Axes, groups: dict[str, Rows], across: str, measure: str, style: Callable[[str], Style] | None = None
) -> None:
    """A line for each group of rows."""
    for i, (name, rows) in enumerate(groups.items()):
        options = style(name) if style else {}
        _points(axis, column(rows, across), column(rows, measure), name, i, **options)


def _beside(axis: Axes, groups: dict[str, Rows], measure: str, shift: float) -> None:
    """Points of each group of rows, those of the same place side by side."""
    for i, (name, rows) in enumerate(groups.items()):
        _points(axis, [x + shift * i for x in range(len(rows))], column(rows, measure), name, i, line="")


def _points(
    axis: Axes,
    x: Sequence[float],
    found: Sequence[Interval],
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
