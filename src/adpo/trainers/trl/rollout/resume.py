"""The rollout at hand as a part of checkpoints: a run goes on exactly where it stopped, in the middle of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

COUNTERS = "rollout.json"
Part = dict[str, Any]
"""A micro-batch of a rollout: tensors, and names that hold None."""


class BufferedRollout:
    """A part of checkpoints: the rollout at hand in micro-batches, and how many of them have been used."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.accelerator = trainer, trainer.accelerator

    def save(self, folder: Path, main: bool) -> None:
        trainer = self.trainer
        rollout: list[Part] = trainer._buffered_inputs or []
        if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0:
            rollout = []  # used up
        tensors, absent = flat(rollout)
        if tensors:
            save_file(tensors, self._path(folder, self.accelerator.process_index))
        if main:
            counters = {"step": trainer._step, "parts": len(rollout), "absent": absent}
            (folder / COUNTERS).write_text(json.dumps(counters) + "\n")

    def load(self, folder: Path) -> None:
        counters = json.loads((folder / COUNTERS).read_text())
        self.trainer._step = counters["step"]
        if counters["parts"]:
            path = self._path(folder, self.accelerator.process_index)
            if not path.exists():
                raise ValueError(f"{folder} was written by a run of fewer processes: resume it with as many")
            if self._path(folder, self.accelerator.num_processes).exists():
                raise ValueError(f"{folder} was written by a run of more processes: resume it with as many")
            tensors = {name: value.to(self.accelerator.device) for name, value in load_file(path).items()}
            self.trainer._buffered_inputs = unflat(tensors, counters["parts"], counters["absent"])

    def size(self) -> int:
        """Little beside the weights."""
        return 0

    @staticmethod
    def _path(folder: Path, process: int) -> Path:
        return folder / f"rollout_{process}.safetensors"


def flat(parts: list[Part]) -> tuple[dict[str, Tensor], list[str]]:
    """All tensors by part and name, and the names that hold nothing.

    >>> import torch
    >>> flat([{"a": torch.ones(1), "b": None}])
    ({'0.a': tensor([1.])}, ['0.b'])
    """
    named = {f"{number}.{name}": value for number, part in enumerate(parts) for name, value in part.items()}
    held = {name: value.clone().contiguous() for name, value in named.items() if value is not None}
    return held, [name for name, value in named.items() if value is None]


def unflat(tensors: dict[str, Tensor], count: int, absent: list[str]) -> list[Part]:
    """The parts again.

    >>> import torch
    >>> unflat({"0.a": torch.ones(1)}, 1, ["0.b"])
    [{'a': tensor([1.]), 'b': None}]
    """
    parts: list[Part] = [{} for _ in range(count)]
    for name, value in {**tensors, **dict.fromkeys(absent)}.items():
        number, _, key = name.partition(".")
        parts[int(number)][key] = value
    return parts
