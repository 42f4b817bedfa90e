"""What `adpo report` does."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from adpo.report.page import page, sections_of
from adpo.report.server import server
from adpo.system.files import write_text


def written(folders: Sequence[Path], out: Path, show: bool, say: Callable[[str], None]) -> None:
    """The page as a file."""
    sections = sections_of(folders)
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; expected a file")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page(sections))
    say(f"{out}: {len(sections)} part{'s' if len(sections) > 1 else ''}")
    if show:
        webbrowser.open(out.resolve().as_uri())


def served(folders: Sequence[Path], port: int, show: bool, say: Callable[[str], None]) -> None:
    """The page from a server, until it is interrupted."""
    sections_of(folders)  # a mistake is told now
    running = server(folders, port)
    address = f"http://127.0.0.1:{running.server_port}/"
    say(f"{address} until Ctrl-C")
    if show:
        webbrowser.open(address)
    try:
        running.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        running.server_close()
