"""``adpo reproduce``: the paper's experiments as commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

from adpo.system.extras import require


class BanditPreset(StrEnum):
    """How much of the bandit experiment to run."""

    smoke = "smoke"
    scenarios = "scenarios"
    paper = "paper"


SEEDS = "How many, instead of the preset's number."
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
    seeds: Annotated[int | None, typer.Option(min=2, max=900, help=SEEDS)] = None,
    first_seed: Annotated[int | None, typer.Option(min=1, max=999, help="The first of them (100).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/bandits"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes side by side (one per core).")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Run the sweep that chooses the hyper-parameters.")] = False,
) -> None:
    """Experiment 1: contextual bandits under twelve kinds of noise."""
    require("bandits", "report", "matplotlib", "scipy")
    from adpo.experiments.bandits import run

    watch = _Watch()
    with watch.bar("bandits") as done:
        order = run.Order(out, resume, workers or _cores(), done)
        path = run.tune(order) if tune else out / "results.json"
        results = None if tune else run.reproduce(preset.value, seeds, order, first_seed)
    if results is not None:
        run.show(results, watch.console)
    watch.tell(f"Results: {path}", f", {order.workers} processes")


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
    from adpo.runs.by_name import quiet

    quiet()
    watch = _Watch()
    with watch.bar("efficiency") as done:
        results = run.reproduce(preset.value, out, resume, done, minutes)
    run.show(results, watch.console)
    watch.tell(f"Results: {out / 'results.json'}")


class DistillPreset(StrEnum):
    """How much of the distillation experiment to run."""

    smoke = "smoke"
    paper = "paper"


@reproduce.command()
def distill(
    env: Annotated[
        list[str] | None,
        typer.Option(help="An environment; give it again for several."),
    ] = None,
    preset: Annotated[
        DistillPreset,
        typer.Option(help="smoke: about a minute; paper: every study, 10 seeds, hours."),
    ] = DistillPreset.smoke,
    seeds: Annotated[int | None, typer.Option(min=2, max=900, help=SEEDS)] = None,
    first_seed: Annotated[int | None, typer.Option(min=1, max=999, help="The first of them (100).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/distill"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes side by side (one per core).")] = None,
    dagger: Annotated[
        int, typer.Option(min=0, max=10, help="Rounds in which students act and the teacher corrects them.")
    ] = 0,
    teachers: Annotated[
        Path | None, typer.Option(help="Folder with teachers of your own (ENV.safetensors).")
    ] = None,
    train_teacher: Annotated[
        str | None, typer.Option(help="Train a teacher for this environment instead, and write it to --out.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Of --train-teacher: stop then; --resume goes on.")
    ] = None,
) -> None:
    """Experiment 2: students of MuJoCo policies."""
    require("distill", "control", "gymnasium", "mujoco", "safetensors")
    require("distill", "report", "matplotlib", "scipy")
    if minutes is not None and train_teacher is None:
        raise ValueError(
            "--minutes is for --train-teacher alone; a run of students can be stopped and resumed at any time"
        )
    from adpo.experiments.distill import run
    from adpo.experiments.distill import teachers as rooms

    watch = _Watch(width=180)
    if train_teacher is not None:
        with watch.bar(f"teacher of {train_teacher}") as done:
            card = rooms.train_teacher(train_teacher, out, resume, lambda now: done(now.share), minutes)
        watch.console.print(rooms.told(card), markup=False)
        watch.tell(f"Teacher: {out / train_teacher}.safetensors")
        return
    with watch.bar("distill") as done:
        order = run.Order(out, resume, workers or _cores(), done, teachers or rooms.SHIPPED)
        results = run.reproduce(preset.value, tuple(env) if env else None, seeds, order, dagger, first_seed)
    run.show(results, watch.console)
    watch.tell(f"Results: {out / 'results.json'}")


class ReasoningPreset(StrEnum):
    """How much of the reasoning experiment to run."""

    smoke = "smoke"
    embedded = "embedded"
    sums = "sums"
    gpu = "gpu"
    paper = "paper"


@reproduce.command()
def reasoning(
    preset: Annotated[
        ReasoningPreset,
        typer.Option(
            help="smoke: two minutes; embedded: the model of adpo train, hours; sums: its headline, where no "
            "held-out sum is trained on the other way round; gpu: SmolLM2; paper: Qwen3."
        ),
    ] = ReasoningPreset.smoke,
    methods: Annotated[
        str | None, typer.Option(help="Some of adpo,adpo_pl,boltzmann,pl,grpo,dr_grpo,gspo.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=2, max=900, help=SEEDS)] = None,
    first_seed: Annotated[int | None, typer.Option(min=1, max=999, help="The first of them (1).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/reasoning"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin nothing after so many minutes.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a name, or a .gguf file.")] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter of the start.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the problems.")] = None,
    known: Annotated[
        Path | None,
        typer.Option(help="Runs of an earlier job, a runs.json: what is in it is not run again."),
    ] = None,
    studies: Annotated[
        str | None,
        typer.Option(
            help="Some of seeds,inner,range,control,mean,…: what is run beside the choice of rates and settings, "
            "in this order."
        ),
    ] = None,
    warm_up: Annotated[
        bool, typer.Option("--warm-up", help="Make the start instead: an adapter, written to --out.")
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Of --warm-up: fewer leave more to learn.")] = 3,
) -> None:
    """Experiment 3: a language model on verifiable rewards."""
    require("reasoning", "lm", "trl", "datasets", "math_verify", "peft")
    require("reasoning", "report", "matplotlib", "scipy")
    from adpo.experiments.reasoning import run

    watch = _Watch(width=220)
    with watch.bar("reasoning") as done:
        some = None if studies is None else tuple(studies.split(","))
        order = run.Order(out, resume, workers, done, minutes, model, adapter, data, known, some)
        if warm_up:
            watch.tell(run.warm_up(preset.value, order, epochs))
            return
        results = run.reproduce(preset.value, methods.split(",") if methods else None, seeds, order, first_seed)
    run.show(results, watch.console)
    watch.tell(f"Results: {out / 'results.json'}")


@reproduce.command()
def geometry(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/geometry"),
) -> None:
    """Figure 1: the simplex, the landscape of SFT, the anchored bowl, curvature, forces; from the core."""
    require("geometry", "report", "matplotlib")
    from adpo.experiments.geometry import run
    from adpo.experiments.tables import terminal

    watch = _Watch()
    results = run.reproduce(out)
    for table in terminal(run.tables(results)):
        watch.console.print(table, markup=False)
    watch.tell(f"Results: {out / 'results.json'}")


class DefaultsPreset(StrEnum):
    """How many studies there are."""

    smoke = "smoke"
    cpu = "cpu"


@reproduce.command()
def defaults(
    preset: Annotated[
        DefaultsPreset, typer.Option(help="smoke: a minute; cpu: five studies of the package's jobs, two hours.")
    ] = DefaultsPreset.smoke,
    out: Annotated[Path, typer.Option(help="Folder of the studies.")] = Path("runs/defaults"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run in --out stopped.")] = False,
) -> None:
    """Settings to begin with: studies of adpo tune, held against the jobs as they are."""
    require("defaults", "tune", "optuna", "matplotlib", "scipy")
    from adpo.experiments.tables import terminal
    from adpo.tuning import defaults as studies

    watch = _Watch()
    found = studies.reproduce(preset.value, out, resume, lambda line: watch.console.print(line, markup=False))
    for table in terminal([studies.to_begin_with(found)]):
        watch.console.print(table)
    watch.tell(f"Results: {out / 'results.json'}")


class _Watch:
    """A bar while a command works, and how long it took."""

    def __init__(self, width: int = 160) -> None:
        self.started = time.perf_counter()
        self.console = Console(width=None if sys.stdout.isatty() else width)

    @contextmanager
    def bar(self, name: str) -> Iterator[Callable[[float], None]]:
        columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(name, total=1.0)
            yield lambda share: progress.update(task, completed=share)

    def tell(self, what: str, more: str = "") -> None:
        minutes, seconds = divmod(round(time.perf_counter() - self.started), 60)
        self.console.print(f"{what} (this run took {minutes} min {seconds} s{more})")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
