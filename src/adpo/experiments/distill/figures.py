"""Return and distance against what a study changes, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from adpo.experiments.distill.protocol import STUDIES
from adpo.experiments.pictures import save


def draw(results: dict[str, Any], folder: Path) -> None:
    """One figure a study: environments side by side; return with noise above, distance below."""
    for study, label in STUDIES.items():
        rows = [row for row in results["summary"] if row["study"] == study]
        if rows:
            _study(rows, label, folder / study)


def _study(rows: list[dict[str, Any]], label: str, path: Path) -> None:
    names = list(dict.fromkeys(row["environment"] for row in rows))
    figure, axes = plt.subplots(2, len(names), figsize=(6 * len(names), 7), sharex="col", squeeze=False)
    for column, name in enumerate(names):
        for method in dict.fromkeys(row["method"] for row in rows):
            chosen = [row for row in rows if (row["environment"], row["method"]) == (name, method)]
            chosen.sort(key=lambda row: float(row["value"]))
            at = [row["value"] for row in chosen]
            line = "-" if method.startswith("ADPO") else "--"
            for axis, measure in zip(axes[:, column], ("stochastic_share", "kl"), strict=True):
                middle, half = ([row[key] for row in chosen] for key in (measure, f"{measure}_ci"))
                axis.errorbar(at, middle, half, fmt=f"o{line}", capsize=2, markersize=3, label=method)
        axes[0, column].set_title(name)
        axes[0, column].axhline(1.0, color="grey", linewidth=0.8)
        axes[1, column].set_yscale("log")
        axes[1, column].set_xlabel(label)
        if max(row["value"] for row in rows) > 4:
            axes[1, column].set_xscale("log")
    axes[0, 0].set_ylabel("return with noise, of the teacher's")
    axes[1, 0].set_ylabel("KL(teacher, student)")
    axes[0, -1].legend(fontsize=7)
    figure.tight_layout()
    save(figure, path.parent, path.name)
