"""What `ADPOTrainer` adds to a checkpoint: temperature and anchors, as JSON and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from adpo.anchors import Snapshot as Self

STATE = "adpo.json"


def save(folder: Path, numbers: Mapping[str, Any], anchors: Mapping[str, Self]) -> None:
    """Beside the model's own files."""
    steps, equal = {}, {}
    for name, anchor in anchors.items():
        state = anchor.state_dict()
        steps[name], equal[name] = state["steps"], state["equal"]
        save_file({key: value.contiguous() for key, value in state["shadow"].items()}, _path(folder, name))
    everything = {**numbers, "anchor_steps": steps, "anchor_equal": equal}
    (folder / STATE).write_text(json.dumps(everything, indent=1) + "\n")


def load(folder: Path, anchors: Mapping[str, Self]) -> dict[str, Any]:
    """Fill the anchors, return the numbers."""
    path = folder / STATE
    try:
        numbers: dict[str, Any] = json.loads(path.read_text())
        steps, equal = numbers.pop("anchor_steps"), numbers.pop("anchor_equal")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder} cannot be resumed: {STATE} is missing or damaged ({type(error).__name__})"
        ) from None
    for name, anchor in anchors.items():
        if name not in steps or not _path(folder, name).exists():
            raise ValueError(f"{folder} holds no state of the {name}: was it trained with other options?")
        shadow = load_file(_path(folder, name))
        anchor.load_state_dict({"steps": steps[name], "equal": equal[name], "shadow": shadow})
    return numbers


def _path(folder: Path, name: str) -> Path:
    return folder / f"adpo_{name}.safetensors"
