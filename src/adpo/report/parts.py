"""What a page is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adpo.experiments.tables import Lines, ShownBy


class Series(NamedTuple):
    """A line of a chart, or bars of one colour."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    faint: bool = False  # behind the others: one seed of several
    half: Sequence[float | None] | None = None  # widths of the intervals, to one side


class Chart(NamedTuple):
    """Lines over a common axis."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    bars: bool = False


class Frame(NamedTuple):
    """One position of a slider: a surface over a square, and points that are marked on it."""

    label: str
    axis: Sequence[float]
    heights: Sequence[Sequence[float | None]]
    marked: dict[str, Sequence[float]]


class Surface(NamedTuple):
    """A surface that a slider changes."""

    title: str
    x: str
    y: str
    slider: str  # what it changes
    frames: Sequence[Frame]


class Member(NamedTuple):
    """A completion of a group; ``c`` is dloss/dlogp: negative where it is made more likely."""

    text: str
    reward: float
    c: float


class Group(NamedTuple):
    """Completions of one prompt, at one step."""

    step: int
    prompt: str
    members: Sequence[Member]


class Claim(NamedTuple):
    """What the paper says, and what was found here."""

    paper: str
    here: str


@dataclass
class Section:
    """The results of one folder."""

    title: str
    state: str  # finished, going on
    facts: dict[str, str] = field(default_factory=dict)  # command, commit, versions, seed
    figures: dict[str, str] = field(default_factory=dict)  # the few numbers that matter
    charts: list[Chart] = field(default_factory=list)
    surfaces: list[Surface] = field(default_factory=list)
    tables: list[Lines] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)  # name to data address
    notes: list[str] = field(default_factory=list)

    @property
    def tests(self) -> dict[str, str]:
        """Tests that cells of its tables are shown by, and where on the page they are named."""
        cells = (cell for table in self.tables for row in table.rows for cell in row)
        named = dict.fromkeys(cell.test for cell in cells if isinstance(cell, ShownBy))
        slug = "".join(letter if letter.isalnum() else "-" for letter in self.title)
        return {test: f"{slug}-test-{number}" for number, test in enumerate(named, 1)}

    def drawn(self) -> dict[str, Any]:
        """What the page's script draws."""
        charts = [
            {**chart._asdict(), "series": [line._asdict() for line in chart.series]} for chart in self.charts
        ]
        surfaces = [
            {**each._asdict(), "frames": [frame._asdict() for frame in each.frames]} for each in self.surfaces
        ]
        found: dict[str, Any] = _readable({"charts": charts, "surfaces": surfaces})
        return found


def _readable(part: Any) -> Any:
    """What is not finite is left out: no browser reads it."""
    if isinstance(part, float):
        return part if math.isfinite(part) else None
    if isinstance(part, dict):
        return {name: _readable(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_readable(value) for value in part]
    return part
