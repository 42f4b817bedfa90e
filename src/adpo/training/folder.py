"""The folder of a run: refused where it would overwrite, found again where a run goes on."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adpo.training.settings import Asked

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Ordered:
    """Where a run goes and how it begins."""

    asked: Asked
    out: Path
    seed: int = 0
    resume: bool = False
    started: float = field(default_factory=time.monotonic)


def check_folder(order: Ordered) -> None:
    """Nothing is written yet, and nothing will be where something else lies."""
    folder, note = order.out, order.out / SETTINGS
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; expected a folder")
    if order.resume:
        if not note.exists():
            raise ValueError(f"--resume: {folder} holds no run of adpo train")
        if json.loads(note.read_text()) != _described(order):
            raise ValueError(
                f"{folder} holds a run with other settings: resume it as it was, or choose another --out"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: add --resume to go on with its run, or choose another --out")


def open_folder(order: Ordered) -> None:
    """Make it, and note what was asked for."""
    order.out.mkdir(parents=True, exist_ok=True)
    (order.out / SETTINGS).write_text(json.dumps(_described(order), indent=1) + "\n")


def last_checkpoint(folder: Path, method: str) -> str | None:
    """The newest checkpoint that was written to its end."""
    mark = "adpo.json" if method == "adpo" else "trainer_state.json"
    whole = [path for path in folder.glob("checkpoint-*") if (path / mark).exists()]
    newest = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return str(newest) if newest is not None else None


def _described(order: Ordered) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(json.dumps({**order.asked.described(), "seed": order.seed}))
    return described
