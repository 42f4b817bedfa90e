"""What adpo's trainers add to a checkpoint: temperature and anchors, as JSON and safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from adpo.anchors import Snapshot
from adpo.trainers.checkpoints.notes import Stateful

STATE = "adpo.json"


class StateFile:
    """A part of checkpoints: the states of some objects, which JSON holds, and the weights that anchors keep.

    States of ``parts`` are merged, those of ``named`` go under their names.
    """

    def __init__(self, anchors: Mapping[str, Snapshot], *parts: Stateful, **named: Stateful) -> None:
        self.anchors, self.parts, self.named = anchors, parts, named

    def save(self, folder: Path, main: bool) -> None:
        if main:
            numbers = {name: part.state_dict() for name, part in self.named.items()}
            for part in self.parts:
                numbers |= part.state_dict()
            save(folder, numbers, self.anchors)

    def load(self, folder: Path) -> None:
        numbers = load(folder, self.anchors)
        try:
            for part in self.parts:
                part.load_state_dict(numbers)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        for name, part in self.named.items():
            part.load_state_dict(numbers[name])

    def size(self) -> int:
        return sum(values.nbytes for anchor in self.anchors.values() for values in anchor.shadow.values())


def save(folder: Path, numbers: Mapping[str, Any], anchors: Mapping[str, Snapshot]) -> None:
    """Beside the model's own files."""
    steps, equal = {}, {}
    for name, anchor in anchors.items():
        state = anchor.state_dict()
        steps[name], equal[name] = state["steps"], state["equal"]
        save_file({key: value.contiguous() for key, value in state["shadow"].items()}, _path(folder, name))
    everything = {**numbers, "anchor_steps": steps, "anchor_equal": equal}
    (folder / STATE).write_text(json.dumps(everything, indent=1) + "\n")


def load(folder: Path, anchors: Mapping[str, Snapshot]) -> dict[str, Any]:
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
