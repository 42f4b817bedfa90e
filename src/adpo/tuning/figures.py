"""How settings interact: every pair of them, coloured by what was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from adpo.experiments.pictures import save


def draw(results: dict[str, Any], folder: Path) -> None:
    names = list(results["space"])
    trials = [trial for trial in results["trials"] if trial["accuracy"] is not None]
    reached = [100 * trial["accuracy"] for trial in trials]
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
            axis.set_xscale("log" if results["space"][across]["log"] else "linear")
            if row != column and results["space"][down]["log"]:
                axis.set_yscale("log")
            if row == size - 1:
                axis.set_xlabel(across)
            if column == 0 or row == column:
                axis.set_ylabel("accuracy, %" if row == column else down)
            axis.grid(alpha=0.2)
    figure.tight_layout()
    if dots is not None:
        figure.colorbar(dots, ax=grid.ravel().tolist(), label="accuracy on watched problems, %", shrink=0.8)
    save(figure, folder, "interactions")
