"""Tables of results: on the terminal, as Markdown, and read from it again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from adpo.experiments.rows import Row

Cell = str | Callable[[Row], str]
"""A format of the fields of a row, such as "{mean:.1%}", or a function of the row."""
Columns = Sequence[tuple[str, Cell]]
"""Headings, and what stands below them."""
_LINK = re.compile(r"\[(.*?)\]\([^)]*\)")
_TEST = re.compile(r"\[.*\]\((tests/[\w/]+\.py) '(\w+)'\)")


class ShownBy(str):
    """What a cell says, and the test that shows it."""

    __slots__ = ("test",)
    test: str

    def __new__(cls, text: str, test: str) -> ShownBy:
        made = super().__new__(cls, text)
        made.test = test
        return made


class Lines(NamedTuple):
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def table(title: str, columns: Columns, rows: Iterable[Row]) -> Lines:
    """A line for each row of results; a column is its heading and what is written of a row.

    >>> table("runs", [("method", "{name}"), ("right", "{right:.0%}")], [{"name": "ADPO", "right": 0.5}])
    Lines(title='runs', columns=('method', 'right'), rows=[('ADPO', '50%')])
    """
    lines = [
        tuple(cell.format_map(row) if isinstance(cell, str) else cell(row) for _, cell in columns) for row in rows
    ]
    return Lines(title, tuple(heading for heading, _ in columns), lines)


def terminal(tables: Iterable[Lines], **options: Any) -> list[Table]:
    """``options`` are those of `rich.table.Table`."""
    made = []
    for title, columns, rows in tables:
        shown = Table(*columns, title=title, **options)
        for row in rows:
            shown.add_row(*row)
        made.append(shown)
    return made


def markdown(tables: Iterable[Lines], spaced: bool = False) -> str:
    """As the documents quote them; ``spaced`` is how the pages of some experiments write the line of dashes."""
    parts = []
    for title, columns, rows in tables:
        dashes = _line(["---"] * len(columns)) if spaced else "|" + "---|" * len(columns)
        parts.append("\n".join([f"### {title}", "", _line(columns), dashes, *map(_line, rows), ""]))
    return "\n".join(parts)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(text: str) -> list[Lines]:
    """The tables of a Markdown file, with the headings above them; a link is its text, one to a test knows it.

    >>> read("| a |\\n|---|\\n| [1](tests/test_core.py 'test_one') |\\n")[0].rows[0][0].test
    'tests/test_core.py::test_one'
    >>> read("### one\\n\\n| a | b |\\n|---|---|\\n| 1 | [2](x 'y') |\\n")
    [Lines(title='one', columns=['a', 'b'], rows=[['1', '2']])]
    """
    found: list[Lines] = []
    title, rows = "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            title = line.lstrip("# ")
        if line.startswith("|"):
            inner = line.strip().removeprefix("|").removesuffix("|")
            rows.append([_cell(cell.strip()) for cell in inner.split(" | ")])
        elif rows:
            found.append(Lines(title, rows[0], rows[2:]))
            rows = []
    return found


def _cell(text: str) -> str:
    said = _LINK.sub(r"\1", text).replace("**", "").replace("`", "")
    test = _TEST.fullmatch(text)
    return ShownBy(said, "::".join(test.groups())) if test else said
