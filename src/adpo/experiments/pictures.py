"""Figures as files: the same figure gives the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

mpl.rcParams["svg.hashsalt"] = "adpo"


def save(figure: Figure, folder: Path, name: str, **options: Any) -> None:
    """As SVG and PNG; the figure is let go."""
    for ending in ("svg", "png"):
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(folder / f"{name}.{ending}", dpi=150, metadata=metadata, **options)
    plt.close(figure)
