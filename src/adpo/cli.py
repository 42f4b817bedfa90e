"""The ``adpo`` command."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import logging
import platform
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import adpo
from adpo.commands.reproduce import reproduce
from adpo.commands.tune import tune
from adpo.commands.verl import verl_config, verl_data
from adpo.system.errors import NothingLearnedError
from adpo.system.extras import require

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Anchored Direct Preference Optimization: alignment as one equation.",
)


Seed = Annotated[int, typer.Option(min=0, help="Seed of every random draw.")]
OwnSeed = Annotated[int | None, typer.Option(min=0, help="Seed of every random draw (the run's, or 0).")]


@app.callback()
def _root() -> None:
    """Anchored Direct Preference Optimization: alignment as one equation."""


@app.command()
def demo(
    seed: Seed = 0,
    iterations: Annotated[int, typer.Option(min=1, help="Rollouts in each mode.")] = 200,
) -> None:
    """Run Algorithm 1 of the paper on a small contextual bandit, online and offline (seconds)."""
    from adpo.experiments import demo as experiment

    protocol = experiment.Protocol(iterations=iterations)
    console = Console()
    console.print(
        f"Algorithm 1 on a contextual bandit: {protocol.items} items, groups of {protocol.group}, "
        f"reward noise {protocol.noise}, seed {seed}."
    )
    started = time.perf_counter()
    with Progress(console=console, transient=True) as progress:
        tasks = {
            mode: progress.add_task(mode, total=iterations * protocol.inner_steps)
            for mode in ("online", "offline")
        }
        scores = experiment.run(protocol, seed, lambda mode, _: progress.advance(tasks[mode]))
    table = Table("mode", "objective", "mean reward", "mass on the best item")
    objectives = {"online": "Boltzmann, on-policy anchor", "offline": "Plackett-Luce, self anchor"}
    for mode, (before, after) in scores.items():
        table.add_row(
            mode,
            objectives[mode],
            f"{before.reward:+.2f} → {after.reward:+.2f}",
            f"{before.best_mass:.2f} → {after.best_mass:.2f}",
        )
    console.print(table)
    console.print(f"{time.perf_counter() - started:.1f} s. Next: `adpo train`, `adpo taxonomy`, the README.")


class Method(StrEnum):
    """Which loss: ours, or TRL's own for comparison."""

    adpo = "adpo"
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    gspo = "gspo"


ANY_KEY = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=ANY_KEY)
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    method: Annotated[Method | None, typer.Option(help="The loss; TRL's own ones for comparison.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (a new one under runs/).")] = None,
    seed: OwnSeed = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the settings, estimate memory, stop.")] = False,
) -> None:
    """Fine-tune a language model on verifiable rewards; without arguments a small one, in minutes.

    Any argument of ADPOConfig (or of TRL's GRPOConfig for the other methods) may follow as --key value, and so may
    model, task, level, data, eval_data, levels, reward, use_peft and the like: see docs/train.md.
    """
    started = time.monotonic()
    require("train", "lm", "trl", "peft", "math_verify", "tensorboard", "yaml")
    from adpo.runs import train_eval as command

    command.train(config, context.args, method.value if method else None, out, seed, resume, dry_run, started)


@app.command(context_settings=ANY_KEY)
def prefer(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad rows out, and count them.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (a new one under runs/).")] = None,
    seed: OwnSeed = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the settings and the data, stop.")] = False,
) -> None:
    """Train on lists of completions with rewards or ranks: adpo prefer DATA --model M.

    DATA is a file of JSON lines or Parquet, or a name for datasets: prompt, completions, and rewards or ranks; or
    prompt, chosen, rejected. Without DATA, generated lists; without --model, a small one. Any argument of
    ListwiseConfig may follow as --key value, and so may model, reference, eval_data, use_peft and the like: see
    docs/prefer.md.
    """
    require("prefer", "lm", "trl", "peft", "datasets", "tensorboard", "yaml")
    from adpo.runs import prefer as offline

    words = [*context.args, *(["--skip_bad"] if skip_bad else [])]
    offline.command(words, config, out, seed, resume, dry_run)


@app.command(name="eval", context_settings=ANY_KEY)
def evaluate(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a model or adapter.")],
    before: Annotated[str | None, typer.Option(help="Another model, to compare on the same problems.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers drawn per problem.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the drawn answers.")] = 1.0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer (the run's, or 256).")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures and all answers.")] = None,
    seed: OwnSeed = None,
) -> None:
    """Accuracy and pass@k of a checkpoint, with confidence intervals.

    Problems are chosen as in train: --data, --levels, --task, --level, --eval_problems and the like.
    """
    require("eval", "lm", "trl", "peft", "math_verify", "yaml")
    from adpo.runs import train_eval as command

    command.evaluate(checkpoint, before, context.args, samples, temperature, max_new_tokens, out, seed)


app.command(context_settings=ANY_KEY)(tune)
app.add_typer(reproduce, name="reproduce")


for command_of_verl in (verl_config, verl_data):
    app.command()(command_of_verl)


@app.command()
def taxonomy() -> None:
    """Print the unified table of alignment methods, from the presets themselves."""
    table = Table("algorithm", "preset", "anchor", "target Q", "divergence D", "tau", "behaviour")
    for row in adpo.presets.TAXONOMY:
        objective = row.objective
        table.add_row(
            row.algorithm,
            row.preset.__name__,
            row.anchor,
            escape(str(objective.target)),
            str(objective.divergence),
            f"{objective.tau:g}",
            row.behaviour,
        )
    # Piped into a file or another program, the table keeps its full width.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Results of train, prefer, reproduce.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    open_it: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    serve: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve it at this port of 127.0.0.1, and follow the runs.")
    ] = None,
) -> None:
    """Make one self-contained HTML page from results, finished or going on."""
    require("report", "report", "jinja2", "plotly", "scipy")
    from adpo.report import make_report as command

    def say(line: str) -> None:
        Console().print(line, markup=False)

    if serve is None:
        command.written(folders, out, open_it, say)
    else:
        command.served(folders, serve, open_it, say)


@app.command()
def env() -> None:
    """Print versions, devices, optional parts, and which fast paths a model gets here."""
    import torch

    table = Table("what", "here", show_header=False)
    table.add_row("adpo", adpo.__version__)
    table.add_row("python", f"{platform.python_version()} on {platform.machine()}")
    table.add_row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    table.add_row("devices", ", ".join(devices) or "cpu")
    for extra, package in {"lm": "trl", "control": "gymnasium", "report": "matplotlib", "verl": "verl"}.items():
        found = importlib.util.find_spec(package) is not None
        version = importlib.metadata.version(package) if found else f"missing: pip install 'adpo[{extra}]'"
        table.add_row(f"{package} (extra {extra})", escape(version))
    if importlib.util.find_spec("transformers") is not None:
        from adpo.scoring.scorer import available_forms

        for name, state in available_forms().items():
            table.add_row(name, escape(state))
    Console().print(table)


STOPPED = 130  # what a shell gives to a program that Ctrl-C ended
NO_PLACE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)
"""The disk is full, read-only, or not ours; or the name is none for a file or folder there."""


def main() -> None:
    """Run the command; anything wrong with the input is one line and exit code 2."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # what it has no kernels for here concerns nobody
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == STOPPED:
            print("adpo: stopped", file=sys.stderr)
    except (typer.Abort, KeyboardInterrupt):
        print("adpo: stopped", file=sys.stderr)
        code = STOPPED
    except ValueError as error:
        print(f"adpo: {error}", file=sys.stderr)
        code = 2
    except NothingLearnedError as error:
        print(f"adpo: {error}", file=sys.stderr)
        code = 1
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        print(f"adpo: {error.filename or 'the disk'} cannot be written: {error.strerror}", file=sys.stderr)
        code = 2
    except Exception as error:
        if hasattr(error, "stopped_by"):
            print("adpo: stopped", file=sys.stderr)
            sys.exit(128 + error.stopped_by)
        # The parser's errors share no public base class, but all of them can format themselves.
        if not hasattr(error, "format_message"):
            raise
        print(f"adpo: {' '.join(error.format_message().split())} (try `adpo --help`)", file=sys.stderr)
        code = 2
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
