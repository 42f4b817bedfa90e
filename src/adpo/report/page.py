"""The page: templates, data and library in one file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from adpo.report import experiment_page as experiments
from adpo.report import training
from adpo.report.parts import Section

TITLE = "adpo"


def sections_of(folders: Sequence[Path]) -> list[Section]:
    """One for each folder."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder")
        kinds = [kind.section for kind in (training, experiments) if kind.recognised(folder)]
        if not kinds:
            raise ValueError(
                f"{folder} holds no results: expected a run of adpo train or adpo prefer (settings.json), "
                "of adpo reproduce (results.json) or of adpo tune (study.json)"
            )
        try:
            made = kinds[0](folder)
            made.drawn()
            found.append(made)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"{folder}: its results are not as adpo writes them ({told})") from None
    return found


def page(sections: Sequence[Section], live: bool = False) -> str:
    """HTML that needs nothing else; ``live`` asks a server behind it for more."""
    environment = _environment()
    library, script = get_plotlyjs(), _file("page.js")
    return environment.get_template("page.html").render(
        title=TITLE,
        sections=sections,
        style=_file("page.css"),
        library=library,
        script=script,
        allowed=" ".join(map(_digest, (library, script))),
        data=harmless(data_of(sections, live)),
    )


def data_of(sections: Sequence[Section], live: bool = False) -> dict[str, Any]:
    """What the script draws, and the words of each part where they may change."""
    parts = [section.drawn() for section in sections]
    template = _environment().get_template("words.html")
    words = [template.render(section=section) for section in sections] if live else []
    version = hashlib.sha256(json.dumps([parts, words]).encode()).hexdigest()[:16]
    return {"version": version, "live": live, "parts": parts, "words": words}


def harmless(data: Any) -> str:
    """JSON that cannot end the element it stands in.

    >>> harmless({"said": "</script><script>"})
    '{"said": "\\\\u003c/script>\\\\u003cscript>"}'
    """
    return (
        json.dumps(data, allow_nan=False)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _environment() -> Environment:
    return Environment(loader=PackageLoader("adpo.report"), autoescape=True, undefined=StrictUndefined)


def _file(name: str) -> str:
    return files("adpo.report").joinpath("templates", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """A browser runs these scripts and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
