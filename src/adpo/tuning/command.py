"""What `adpo tune` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from adpo.experiments.tables import markdown, terminal
from adpo.files import write_json, write_text
from adpo.training.keys import parse_pairs, read_yaml
from adpo.tuning import summary
from adpo.tuning.figures import draw
from adpo.tuning.population import Plan, raised
from adpo.tuning.spaces import space
from adpo.tuning.study import RESULTS, Order, tuned
from adpo.tuning.trials import Job


def tune(
    job: str,
    words: Sequence[str],
    ranges: Sequence[str],
    seed: int,
    order: Order,
    console: Console,
    plan: Plan | None = None,
) -> None:
    """Try out, then write what follows: results, tables, a figure, a file for ``--config``."""
    if plan is not None and job != "train":
        raise ValueError("--population is for adpo tune train")
    data = list(words[:1]) if words and not words[0].startswith("--") else []
    typed = parse_pairs(words[len(data) :])
    for name in ("out", "resume", "seed", "dry_run"):
        typed.pop(name, None)
    config = typed.pop("config", None)
    in_file = read_yaml(Path(str(config))) if config is not None else {}
    asked, tried = Job(job, tuple(words), seed), space(job, typed, ranges, in_file)
    found = tuned(asked, tried, order) if plan is None else raised(asked, tried, order, plan)
    write_json(order.out / RESULTS, found)
    tables = [summary.recommended(found), summary.every(found)]
    if plan is not None:
        tables.insert(0, summary.lineage(found))
    write_text(order.out / "tables.md", markdown(tables))
    write_text(order.out / "best.yaml", summary.config(found, {**in_file, **typed}))
    draw(found, order.out)
    for table in terminal(tables[:-1]):
        console.print(table)
    if plan is not None:
        console.print(f"Weights of the winner: {order.out / found['model']}")
    told: Path = order.out / "best.yaml"
    again = " ".join(["adpo", job, *data, "--config", str(told)])
    console.print(f"{again} is the best of them; all trials: {order.out / 'tables.md'}")
