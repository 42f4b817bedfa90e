"""``adpo reproduce``: the paper's experiments as commands."""

from __future__ import annotations

import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

from adpo.extras import require


class BanditPreset(StrEnum):
    """How much of the bandit experiment to run."""

    smoke = "smoke"
    scenarios = "scenarios"
    paper = "paper"


reproduce = typer.Typer(help="Run the paper's experiments.")


@reproduce.callback()
def _reproduce() -> None:
    """Run the paper's experiments."""


@reproduce.command()
def bandits(
    preset: Annotated[
        BanditPreset,
        typer.Option(help="smoke: a minute; scenarios: the twelve, 30 seeds; paper: every study, 10 seeds."),
    ] = BanditPreset.smoke,
    seeds: Annotated[int | None, typer.Option(min=2, max=900, help="Instead of the preset's number.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/bandits"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes side by side (one per core).")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Run the sweep that chooses the hyper-parameters.")] = False,
) -> None:
    """Experiment 1: contextual bandits under twelve kinds of noise."""
    require("bandits", "report", "matplotlib", "scipy")
    from adpo.experiments.bandits import run

    started = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 160)
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("bandits", total=1.0)
        order = run.Order(out, resume, workers or _cores(), lambda share: progress.update(task, completed=share))
        path = run.tune(order) if tune else out / "results.json"
        results = None if tune else run.reproduce(preset.value, seeds, order)
    if results is not None:
        run.show(results, console)
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    console.print(f"Results: {path} (this run took {minutes} min {seconds} s, {order.workers} processes)")


class EfficiencyPreset(StrEnum):
    """How much of the efficiency experiment to run."""

    smoke = "smoke"
    gpu = "gpu"


@reproduce.command()
def efficiency(
    preset: Annotated[
        EfficiencyPreset, typer.Option(help="smoke: a tiny policy, anywhere; gpu: 1.7B, on one large GPU.")
    ] = EfficiencyPreset.smoke,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/efficiency"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin nothing after so many minutes; 0 shows what is there.")
    ] = None,
) -> None:
    """How long one update takes: stock TRL and this package's trainers, the same work, the same gradients."""
    require("efficiency", "lm", "trl", "datasets", "rich")
    from adpo.experiments.efficiency import run
    from adpo.training.models import quiet

    quiet()
    started = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 160)
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("efficiency", total=1.0)
        results = run.reproduce(
            preset.value, out, resume, lambda share: progress.update(task, completed=share), minutes
        )
    run.show(results, console)
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    console.print(f"Results: {out / 'results.json'} (this run took {minutes} min {seconds} s)")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
