"""What a result must say about itself: package, versions, machine, commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from adpo import __version__


def provenance() -> dict[str, str]:
    """Versions and the commit of the checkout this package runs from ("unknown" for an installed wheel)."""
    return {
        "adpo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "commit": _commit(),
    }


def typed() -> str:
    """The command of this process."""
    script = Path(sys.argv[0])
    program = "adpo"
    if script.stem == "__main__" and script.parent.name != "adpo":
        inside = script.parent.parts
        ours = len(inside) - inside[::-1].index("adpo") - 1 if "adpo" in inside else -1  # else another's program
        program = "python -m " + ".".join(inside[ours:])
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _commit() -> str:
    """Where the source was copied without its history, ``ADPO_COMMIT`` tells."""
    if told := os.environ.get("ADPO_COMMIT"):
        return told
    folder = Path(__file__).resolve().parent
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head} with changes" if _git(folder, "status", "--porcelain", "--", ":/src") else head


def _git(folder: Path, *command: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
