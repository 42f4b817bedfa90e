"""What of ADPO is in a checkpoint of verl's, and which of verl's checkpoints a run may be resumed from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from adpo.core.temperature import Temperature

PART = re.compile(r"model_world_size_(\d+)_rank_\d+\.pt")


def check_processes(config: Any) -> None:
    """Each process of verl's reads the part that it wrote: there have to be as many."""
    folder = _resumed_from(config.trainer)
    now = config.trainer.nnodes * config.trainer.n_gpus_per_node
    parts = [PART.fullmatch(path.name) for path in sorted((folder / "actor").glob("*.pt"))] if folder else []
    for before in {int(part[1]) for part in parts if part}:
        if before != now:
            raise ValueError(f"{folder} was written by {before} processes, not {now}: resume it with as many")


def _resumed_from(trainer: Any) -> Path | None:
    if trainer.resume_mode == "resume_path":
        return Path(trainer.resume_from_path)
    root = Path(trainer.default_local_dir).absolute()
    found = find_latest_ckpt_path(str(root)) if trainer.resume_mode == "auto" and root.is_dir() else None
    return Path(found) if found else None


def save_schedule(folder: str, rank: int, schedule: Temperature) -> None:
    """Beside what verl writes for this process."""
    _file(folder, rank).write_text(json.dumps(schedule.state_dict()) + "\n")


def load_schedule(folder: str, rank: int, schedule: Temperature) -> None:
    """A checkpoint of another algorithm has none: the schedule begins there."""
    if _file(folder, rank).exists():
        schedule.load_state_dict(json.loads(_file(folder, rank).read_text()))


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"adpo_schedule_rank_{rank}.json"
