"""Tables of results: on the terminal, as Markdown, and read from it again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table

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
