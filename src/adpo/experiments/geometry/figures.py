"""The paper's Figure 1 and four more, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adpo.experiments.pictures import save
from adpo.experiments.rows import column

HEIGHT = 3**0.5 / 2


def draw(results: dict[str, Any], folder: Path) -> None:
    _save(_three_panels(results), folder, "figure1")
    plots: dict[str, Callable[[Axes, Any], None]] = {
        "curvature": _curvature,
        "trust_region": _trust_region,
        "forces": _forces,
        "two_ways": _two_ways,
    }
    for name, plot in plots.items():
        figure, axis = plt.subplots(figsize=(5.5, 4))
        plot(axis, results[name])
        axis.legend(fontsize=8)
        _save(figure, folder, name)


def _save(figure: Figure, folder: Path, name: str) -> None:
    figure.tight_layout()
    save(figure, folder, name)


def _three_panels(results: dict[str, Any]) -> Figure:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6))
    _simplex(left, results["paths"])
    landscape = results["sft_landscape"]
    values = [[float("nan") if v is None else v for v in row] for row in landscape["loss"]]
    axis = landscape["axis"]
    filled = middle.contourf(axis, axis, list(map(list, zip(*values, strict=True))), levels=16, cmap="viridis")
    figure.colorbar(filled, ax=middle, label="loss")
    middle.set(xlabel="probability of the first", ylabel="probability of the second", title="(b) the loss of SFT")
    bowl = next(each for each in results["bowls"] if each["tau"] == 1)
    axis, table = bowl["axis"], list(map(list, zip(*bowl["loss"], strict=True)))
    filled = right.contourf(axis, axis, table, levels=20, cmap="viridis")
    figure.colorbar(filled, ax=right, label="loss above its minimum")
    right.plot(0, 0, "D", color="crimson", label="the anchor")
    right.plot(*bowl["minimum"], "*", color="white", markersize=12, label="the minimum, anchor + tau log q")
    right.legend(loc="lower left", fontsize=8)
    right.set(
        xlabel="log-ratio of the first", ylabel="log-ratio of the second", title="(c) the anchored loss, tau = 1"
    )
    return figure


def _simplex(axis: Axes, found: dict[str, Any]) -> None:
    axis.fill([0, 1, 0.5], [0, 0, HEIGHT], color="0.92")
    for (name, points), colour in zip(found["paths"].items(), ("tab:orange", "tab:green"), strict=True):
        axis.plot(*zip(*map(_corner, points), strict=True), color=colour, label=name, linewidth=2)
    axis.plot(*_corner(found["reference"]), "o", color="crimson", label="the reference")
    axis.plot(*_corner(found["optimum"]), "*", color="tab:green", markersize=12, label="reference · q^tau")
    for text, (x, y), place in (("1", (0, 0), "right"), ("2", (1, 0), "left"), ("3", (0.5, HEIGHT), "center")):
        axis.text(x, y + (0.02 if place == "center" else -0.05), text, ha=place)
    axis.set(title="(a) on the simplex")
    axis.axis("off")
    axis.legend(fontsize=8, loc="upper right")


def _corner(probabilities: list[float]) -> tuple[float, float]:
    """The first at the left, the second at the right, the third on top."""
    _, second, third = probabilities
    return second + third / 2, third * HEIGHT


def _curvature(axis: Axes, rows: list[dict[str, Any]]) -> None:
    taus = column(rows, "tau")
    for number in range(2):
        axis.loglog(taus, [row["measured"][number] for row in rows], "o", color=f"C{number}")
        expected = [row["expected"][number] for row in rows]
        axis.loglog(taus, expected, color=f"C{number}", label=f"eigenvalue {number + 1} of (Diag(q) − qqᵀ)/tau²")
    axis.set(xlabel="tau", ylabel="curvature at the minimum", title="points: Hessian of the loss")


def _trust_region(axis: Axes, found: dict[str, Any]) -> None:
    axis.loglog(found["tau"], found["kl"], label="KL of the optimum from the reference, nats")
    axis.loglog(found["tau"], found["force"], "--", label="largest force at the first step")
    axis.set(xlabel="tau", title="small tau: near at the end, hard at the start")


def _forces(axis: Axes, found: dict[str, Any]) -> None:
    for name, values in found["forces"].items():
        axis.plot(found["moved"], values, label=name)
    axis.axhline(0, color="0.6", linewidth=0.8)
    axis.set(xlabel="log-ratio of the better candidate to the anchor", ylabel="force upwards", ylim=(-0.4, 1.3))


def _two_ways(axis: Axes, found: dict[str, Any]) -> None:
    axis.fill_between(found["places"], found["target"], color="0.85", label="target")
    for name, values in found["fitted"].items():
        axis.plot(found["places"], values, label=name)
    axis.set(xlabel="candidate", ylabel="probability")
