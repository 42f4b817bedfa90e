"""``adpo tune``: settings of a job chosen by trying them out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adpo.system.extras import require


class Tuned(StrEnum):
    """Jobs whose settings can be chosen by trying them out."""

    train = "train"
    prefer = "prefer"
    bandits = "bandits"
    distill = "distill"
    reasoning = "reasoning"


def tune(
    context: typer.Context,
    job: Annotated[Tuned, typer.Argument(help="What is run for every trial.")],
    trials: Annotated[int, typer.Option(min=1, help="Settings to try, earlier ones of --out included.")] = 20,
    ranges: Annotated[
        list[str] | None, typer.Option("--range", help="name=low:high, once more or instead; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("runs/tune"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study in --out.")] = False,
    confirm: Annotated[
        int, typer.Option(min=0, help="Hold the best three against the job as it is, with so many other seeds.")
    ] = 0,
    population: Annotated[
        int | None, typer.Option(min=2, help="Population-based training of so many members, instead of trials.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of a population.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random draw.")] = 0,
) -> None:
    """Choose tau, beta, the schedule's weights and the learning rate of a job by trying them out.

    What follows is given to the job as it is: adpo tune train --max_steps 100 --tau_schedule hybrid. A setting
    that is given so is not tried. See docs/tune.md.
    """
    require("tune", "tune", "optuna", "matplotlib", "scipy")
    from adpo.tuning import tuner as command
    from adpo.tuning.population import Plan
    from adpo.tuning.study import Order

    console = Console()
    order = Order(out, trials, resume, lambda line: console.print(line, markup=False, highlight=False))
    plan = None if population is None else Plan(population, rounds)
    command.tune(job.value, context.args, ranges or [], seed, order, console, plan, confirm)
