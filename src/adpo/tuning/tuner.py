"""What `adpo tune` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from adpo.experiments.tables import markdown, terminal
from adpo.runs.settings.keys import parse_pairs, read_yaml
from adpo.system.extras import require
from adpo.system.files import write_json, write_text
from adpo.tuning import confirmation, summary, trials
from adpo.tuning.experiment_jobs import EXPERIMENTS
from adpo.tuning.figures import draw
from adpo.tuning.population import Plan, raised
from adpo.tuning.spaces import Range, space, with_ranges
from adpo.tuning.study import RESULTS, Order, tuned
from adpo.tuning.trials import Job, Tried

NEEDS = {
    "train": ("lm", "trl", "peft", "math_verify"),
    "prefer": ("lm", "trl", "peft", "datasets"),
    "bandits": ("report", "matplotlib", "scipy"),
    "distill": ("control", "gymnasium", "mujoco", "safetensors"),
    "reasoning": ("lm", "trl", "datasets", "math_verify", "peft"),
}
"""Of a job: the extra with its packages, beside what tuning needs."""
SETTLED = ("train", "prefer", "bandits", "distill")
"""Jobs that have settings by themselves."""
SETTINGS = "best.yaml"
OF_TUNE = ("out", "resume", "seed", "dry_run")


def tune(
    job: str,
    words: Sequence[str],
    ranges: Sequence[str],
    seed: int,
    order: Order,
    console: Console,
    plan: Plan | None = None,
    confirm: int = 0,
) -> None:
    """Try out, and tell what follows."""
    found = studied(job, words, ranges, seed, order, plan, confirm)
    for table in terminal(_tables(found)[:-1]):
        console.print(table)
    if plan is not None:
        console.print(f"Weights of the winner: {order.out / found['model']}")
    told = order.out / SETTINGS
    if job in EXPERIMENTS:
        console.print(f"{told} is the best of them; all trials: {order.out / 'tables.md'}")
    else:
        again = " ".join(["adpo", job, *_data(words), "--config", str(told)])
        console.print(f"{again} is the best of them; all trials: {order.out / 'tables.md'}")


def studied(
    job: str,
    words: Sequence[str],
    ranges: Sequence[str],
    seed: int,
    order: Order,
    plan: Plan | None = None,
    confirm: int = 0,
) -> dict[str, Any]:
    """A study, and what is written of it: results, tables, a figure, settings to use."""
    needed(job)
    if plan is not None and (job != "train" or confirm):
        raise ValueError("--population is for adpo tune train, without --confirm")
    if confirm and job not in SETTLED:
        raise ValueError(f"--confirm: {job} has no settings of its own that others could be held against")
    asked, tried, settings = _asked(job, words, ranges, seed)
    if plan is not None and isinstance(asked, Job):
        found = raised(asked, tried, order, plan)
    else:
        found = tuned(asked, tried, order)
    confirm = confirm or confirmation.seeds_of(order.out)
    if confirm:
        found["confirmed"] = confirmation.confirmed(asked, found, order, confirm)
    write_json(order.out / RESULTS, found)
    write_text(order.out / "tables.md", markdown(_tables(found)))
    write_text(order.out / SETTINGS, summary.config(found, settings))
    draw(found, order.out)
    return found


def needed(job: str) -> None:
    """Complain about packages that are missing."""
    require(f"tune {job}", *NEEDS[job])


def _asked(
    job: str, words: Sequence[str], ranges: Sequence[str], seed: int
) -> tuple[Tried, dict[str, Range], Mapping[str, Any]]:
    """The job, what is tried, and what was given."""
    typed = parse_pairs(words[len(_data(words)) :])
    if job in EXPERIMENTS:
        experiment = EXPERIMENTS[job](tuple(words), seed)
        tried = with_ranges(experiment.space(), typed, ranges)
        for edge in ("low", "high"):
            experiment.checked(Path(), {name: getattr(bounds, edge) for name, bounds in tried.items()})
        return experiment, tried, typed
    for name in OF_TUNE:
        typed.pop(name, None)
    config = typed.pop("config", None)
    in_file = read_yaml(Path(str(config))) if config is not None else {}
    asked = {**in_file, **typed}
    _needs_validation(job, asked)
    measure = trials.PAIRS if job == "prefer" else trials.REWARD if asked.get("reward") else trials.ACCURACY
    return Job(job, tuple(words), seed, measure), space(job, typed, ranges, in_file), asked


def _needs_validation(job: str, asked: Mapping[str, Any]) -> None:
    """Trials are compared by the validation set."""
    setting = "dev_lists" if job == "prefer" else "dev_problems"
    if asked.get("eval_every") == 0 or asked.get(setting, 0 if asked.get("eval_data") else None) == 0:
        raise ValueError(
            f"trials are compared by the validation set, and there is none: set {setting} (with eval_data none is "
            "taken by itself) and an eval_every above 0"
        )


def _data(words: Sequence[str]) -> list[str]:
    """The name of data, which may stand before all settings."""
    return list(words[:1]) if words and not words[0].startswith("--") else []


def _tables(found: dict[str, Any]) -> list[Any]:
    """What to use comes first, every trial last."""
    first = [confirmation.table(found)] if "confirmed" in found else []
    raised_by = [summary.lineage(found)] if "lineage" in found else []
    return [*first, *raised_by, summary.recommended(found), summary.every(found)]
