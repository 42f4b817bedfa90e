"""Updates per second of every contender in every cell, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from adpo.experiments.pictures import save
from adpo.experiments.rows import column, grouped


def draw(results: dict[str, Any], folder: Path) -> None:
    """One panel a cell: bars of speed, stock TRL with its defaults as one."""
    cells = grouped(results["rows"], "cell")
    figure, axes = plt.subplots(len(cells), 1, figsize=(8, 2.4 * len(cells)), squeeze=False)
    for axis, (cell, rows) in zip(axes[:, 0], cells.items(), strict=True):
        slow = rows[0]["seconds"]
        names = column(rows, "contender")[::-1]
        speeds = [slow / row["seconds"] for row in rows][::-1]
        colours = ["tab:orange" if name.startswith("ours") else "tab:grey" for name in names]
        axis.barh(names, speeds, color=colours)
        axis.set_title(cell, fontsize=9)
        axis.tick_params(labelsize=7)
    axes[-1, 0].set_xlabel("updates, times TRL GRPO with its defaults")
    figure.tight_layout()
    save(figure, folder, "updates")
