"""Tables of results, on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table


class Lines(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def terminal(tables: Iterable[Lines]) -> list[Table]:
    made = []
    for title, columns, rows in tables:
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        made.append(table)
    return made


def markdown(tables: Iterable[Lines]) -> str:
    """As the documents quote them."""
    parts = []
    for title, columns, rows in tables:
        head = [f"### {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        parts.append("\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows), ""]))
    return "\n".join(parts)
