"""What a page is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adpo.experiments.tables import Lines


class Series(NamedTuple):
    """A line of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    faint: bool = False  # behind the others: one seed of several


class Chart(NamedTuple):
    """Lines over a common axis."""

    title: str
    x: str
    y: str
    series: Sequence[Series]


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

    def drawn(self) -> dict[str, Any]:
        """What the page's script draws."""
        charts = [
            {**chart._asdict(), "series": [line._asdict() for line in chart.series]} for chart in self.charts
        ]
        surfaces = [
            {**each._asdict(), "frames": [frame._asdict() for frame in each.frames]} for each in self.surfaces
        ]
        return {"charts": charts, "surfaces": surfaces}
