"""What a person sees while a model trains, and at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

ACCURACY = "accuracy"
"""The measure that reads as a percentage; any other has a unit of its own."""


class Display:
    """A bar for the stage at hand; where nobody looks at a terminal, a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = console.is_terminal
        self._progress: Progress | None = None
        self._task: Any = None

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[None]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self._live) as progress:
            self._progress, self._task = progress, progress.add_task(name, total=total, figures="")
            yield
        self._progress = None

    def at(self, step: int, figures: Mapping[str, float | str | None], line: bool = False) -> None:
        """Where the stage is; ``line`` asks for a line of its own where there is no bar."""
        shown = " ".join(f"{name} {_short(value)}" for name, value in figures.items() if value is not None)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=escape(shown))
        if line and not self._live:
            self.say(f"step {step}: {shown}")


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2g}"


def make_console(quiet: bool = False) -> Console:
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 120)


def summary_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Before and after, and a few answers."""
    figures = Table("test problems", "before", "after", "gain")
    for row in figure_rows(summary):
        figures.add_row(*row)
    answers = Table("problem", "before", "after", "right answer")
    for sample in summary["samples"]:
        cells_of = (" ".join(str(sample[key]).split())[:60] for key in ("problem", "before", "after", "answer"))
        answers.add_row(*(escape(cell) for cell in cells_of))
    return [figures, answers]


def figure_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """What was measured, before, after and the gain."""
    measure = summary.get("measure", ACCURACY)
    first = "reward" if "reward_before" in summary else "accuracy"
    rows = []
    for name, title in ((first, "most likely answer"), ("sampled", "sampled answers")):
        before, after, gain = (summary[f"{name}_{part}"] for part in ("before", "after", "gain"))
        cells = shown(before, measure), shown(after, measure), shown_gain(gain, measure)
        rows.append((f"{measure}, {title}", *cells))
    return rows


def shown(estimate: Mapping[str, float], measure: str) -> str:
    """An accuracy as a percentage, a reward in its own unit."""
    if measure == ACCURACY:
        return percent(estimate)
    value, low, high = (estimate[part] for part in ("value", "low", "high"))
    return f"{value:.4g} \\[{low:.4g}, {high:.4g}]"


def shown_gain(estimate: Mapping[str, float], measure: str) -> str:
    if measure == ACCURACY:
        return points(estimate)
    value, low, high = (estimate[part] for part in ("value", "low", "high"))
    return f"{value:+.4g} \\[{low:+.4g}, {high:+.4g}]"


def percent(estimate: Mapping[str, float]) -> str:
    value, low, high = (100 * estimate[part] for part in ("value", "low", "high"))
    return f"{value:.1f} % \\[{low:.1f}, {high:.1f}]"


def points(estimate: Mapping[str, float]) -> str:
    """A difference of percentages."""
    value, low, high = (100 * estimate[part] for part in ("value", "low", "high"))
    return f"{value:+.1f} points \\[{low:+.1f}, {high:+.1f}]"
