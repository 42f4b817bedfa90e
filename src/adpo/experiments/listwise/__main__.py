"""``python -m adpo.experiments.listwise --data FILE --model DIR --out DIR``."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

STARTED = time.monotonic()
STOPPED = 130  # what a shell gives to a program that Ctrl-C ended


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m adpo.experiments.listwise", description="Whole lists or pairs, at equal compute?"
    )
    made.add_argument("--data", type=Path, help="JSON lines (.gz): instruction, responses with text and label")
    made.add_argument("--model", type=Path, help="a folder that transformers can load, or a .gguf file")
    made.add_argument("--out", type=Path, default=Path("runs/listwise"), help="folder of the results")
    made.add_argument(
        "--preset", choices=["smoke", "gpu"], default="gpu", help="smoke: a tiny model, made-up lists"
    )
    made.add_argument("--methods", help="these alone, with commas between them")
    made.add_argument("--seeds", type=_positive, help="reported runs of each method, instead of the preset's")
    made.add_argument("--first-seed", type=_positive, help="seed of the first reported run (100)")
    made.add_argument("--tokens", type=_positive, help="of a reported run, instead of the preset's")
    made.add_argument("--resume", action="store_true", help="go on where an earlier call with this --out stopped")
    made.add_argument(
        "--budget-seconds", type=float, default=math.inf, help="stop between cells before this is over"
    )
    made.add_argument("--workers", type=_positive, default=1, help="processes side by side on the device")
    return made


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def main() -> int:
    arguments = parser().parse_args()
    from rich.console import Console

    from adpo.experiments.listwise import run, tables
    from adpo.experiments.listwise.protocol import FIRST_SEED
    from adpo.experiments.tables import terminal

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        order = run.Order(
            out=arguments.out,
            data=arguments.data,
            model=arguments.model,
            preset=arguments.preset,
            methods=tuple(arguments.methods.split(",")) if arguments.methods else None,
            seeds=arguments.seeds,
            first_seed=arguments.first_seed or FIRST_SEED,
            tokens=arguments.tokens,
            resume=arguments.resume,
            budget_seconds=arguments.budget_seconds,
            workers=arguments.workers,
            say=console.print,
            started=STARTED,
        )
        results = run.reproduce(order)
    except ValueError as error:
        sys.stderr.write(f"adpo: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("adpo: stopped; go on with --resume\n")
        return STOPPED
    if results is not None:
        for table in terminal(tables.tables(results)):
            console.print(table)
        console.print(f"Results: {arguments.out / 'results.json'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
