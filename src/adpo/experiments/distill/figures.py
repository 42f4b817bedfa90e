"""Return and distance against what a study changes, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from adpo.experiments.distill.protocol import STUDIES
from adpo.experiments.pictures import save
from adpo.experiments.rows import column, grouped, where


def draw(results: dict[str, Any], folder: Path) -> None:
    """One figure a study: environments side by side; return with noise above, distance below."""
    for study, label in STUDIES.items():
        if rows := where(results["summary"], study=study):
            _study(rows, label, folder / study)


def _study(rows: list[dict[str, Any]], label: str, path: Path) -> None:
    worlds = grouped(sorted(rows, key=lambda row: float(row["value"])), "environment")
    figure, axes = plt.subplots(2, len(worlds), figsize=(6 * len(worlds), 7), sharex="col", squeeze=False)
    for (above, below), (name, here) in zip(axes.T, worlds.items(), strict=True):
        for method, mine in grouped(here, "method").items():
            line = "-" if method.startswith("ADPO") else "--"
            for axis, measure in ((above, "stochastic_share"), (below, "kl")):
                at, middle, half = (column(mine, key) for key in ("value", measure, f"{measure}_ci"))
                axis.errorbar(at, middle, half, fmt=f"o{line}", capsize=2, markersize=3, label=method)
        above.set_title(name)
        above.axhline(1.0, color="grey", linewidth=0.8)
        below.set_yscale("log")
        below.set_xlabel(label)
        if max(column(rows, "value")) > 4:
            below.set_xscale("log")
    axes[0, 0].set_ylabel("return with noise, of the teacher's")
    axes[1, 0].set_ylabel("KL(teacher, student)")
    axes[0, -1].legend(fontsize=7)
    figure.tight_layout()
    save(figure, path.parent, path.name)
