"""Files that are whole or not there, and what tells their contents apart."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def check_place(path: Path) -> None:
    """Complain before anything is computed for a file that could not be written."""
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; expected a file")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--out {path}: nothing can be written to {path.parent}")


def write_text(path: Path, text: str) -> None:
    """Under a temporary name, then renamed: a half-written file is never picked up."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_json(path: Path, what_to_do: str = "is it from another program?") -> Any:
    """What it holds; a file that cannot be read is one line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {what_to_do}") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON; the last may still be being written, and the file may not be there yet."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def digest(path: Path) -> str:
    """sha256 of the content."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
