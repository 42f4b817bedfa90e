"""How settings interact: every pair of them, coloured by what was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from adpo.experiments.pictures import save
from adpo.tuning.trials import unit, with_unit


def draw(results: dict[str, Any], folder: Path) -> None:
    names = list(results["space"])
    trials = [trial for trial in results["trials"] if trial["score"] is not None]
    scale, percent = unit(results["measure"])
    reached = [scale * trial["score"] for trial in trials]
    size = len(names)
    figure, grid = plt.subplots(size, size, figsize=(2.6 * size + 1.2, 2.4 * size), squeeze=False)
    dots = None
    for row, down in enumerate(names):
        for column, across in enumerate(names):
            axis = grid[row][column]
            if column > row:
                axis.set_visible(False)
                continue
            x = [trial["values"][across] for trial in trials]
            y = reached if row == column else [trial["values"][down] for trial in trials]
            dots = axis.scatter(x, y, c=reached, cmap="viridis", s=22, edgecolors="0.3", linewidths=0.4)
            _scaled(axis.set_xscale, axis.set_xlim, axis.xaxis, results["space"][across])
            if row != column:
                _scaled(axis.set_yscale, axis.set_ylim, axis.yaxis, results["space"][down])
            if row == size - 1:
                axis.set_xlabel(across)
            if column == 0 or row == column:
                axis.set_ylabel(", ".join(filter(None, ["reached", percent])) if row == column else down)
            axis.grid(alpha=0.2)
    figure.tight_layout()
    if dots is not None:
        figure.colorbar(dots, ax=grid.ravel().tolist(), label=with_unit(results["measure"]), shrink=0.8)
    save(figure, folder, "interactions")


def _scaled(set_scale: Any, set_limits: Any, axis: Any, bounds: dict[str, Any]) -> None:
    """Over the whole of what was tried; decades alone have labels."""
    low, high = bounds["low"], bounds["high"]
    if bounds["log"]:
        set_scale("log")
        axis.set_minor_formatter(NullFormatter())
        set_limits(low / 1.2, high * 1.2)
    else:
        set_limits(low - 0.05 * (high - low), high + 0.05 * (high - low))
