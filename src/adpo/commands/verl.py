"""Commands that prepare runs on verl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adpo.system.extras import require
from adpo.system.files import check_place


def verl_config(
    model: Annotated[str, typer.Option(help="Name or folder.")] = "Qwen/Qwen3-1.7B",
    train: Annotated[str, typer.Option(help="File of training problems (adpo verl-data).")] = "train.parquet",
    validation: Annotated[str, typer.Option(help="File of validation problems.")] = "test.parquet",
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a machine.")] = 8,
) -> None:
    """Print the paper's run as a command of verl's, for one machine or many."""
    from adpo.trainers.verl import recipe

    print(recipe.command(recipe.overrides(model, train, validation, nodes, gpus)))


def verl_data(
    data: Annotated[str, typer.Argument(help="JSON lines with problems, or a data set's name.")],
    out: Annotated[Path, typer.Option(help="Parquet file to write.")],
    levels: Annotated[list[int] | None, typer.Option(help="Only these; give it again for several.")] = None,
    split: Annotated[str, typer.Option(help="Of a named data set.")] = "train",
) -> None:
    """Write problems as a file that verl reads, for the paper's run: MATH of levels 3 and 4."""
    require("verl-data", "lm", "pyarrow", "datasets")
    from adpo.runs.splits import is_file, named
    from adpo.tasks.problems import load, of_rows
    from adpo.trainers.verl.data import write

    check_place(out)
    found = load(data, levels) if is_file(data) else of_rows(named(data, None, split), f"{data}, {split}", levels)
    write(found, out)
    Console().print(f"{len(found):,} problems: {out}", markup=False)
