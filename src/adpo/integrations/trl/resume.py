"""Runs of TRL's `GRPOTrainer` that go on exactly where they stopped: in the middle of a rollout, in any epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from trl import GRPOTrainer

from adpo.integrations.checkpoints import SafeCheckpoints
from adpo.integrations.epochs import StartEpoch
from adpo.integrations.trl import contract

COUNTERS = "rollout.json"
Part = dict[str, Any]
"""A micro-batch of a rollout: tensors, and names that hold None."""


class ExactResume(SafeCheckpoints, GRPOTrainer):  # type: ignore[misc]
    """A `GRPOTrainer` whose checkpoints hold the rollout at hand, and whose epochs are shuffled by number."""

    train_sampler: Any = None
    _buffered_inputs: list[Part] | None  # the rollout at hand, in micro-batches

    def __init__(self, *arguments: Any, **options: Any) -> None:
        contract.check_class(GRPOTrainer)
        super().__init__(*arguments, **options)
        contract.check_trainer(self)
        self.add_callback(StartEpoch(self))

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    def _save_own(self, folder: Path) -> None:
        super()._save_own(folder)
        rollout = self._buffered_inputs or []
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            rollout = []  # used up
        tensors, absent = flat(rollout)
        rank = self.accelerator.process_index
        if tensors:
            save_file(tensors, folder / f"rollout_{rank}.safetensors")
        if self.args.should_save:
            counters = {"step": self._step, "parts": len(rollout), "absent": absent}
            (folder / COUNTERS).write_text(json.dumps(counters) + "\n")

    def _load_own(self, folder: Path) -> None:
        super()._load_own(folder)
        counters = json.loads((folder / COUNTERS).read_text())
        self._step = counters["step"]
        if counters["parts"]:
            device = self.accelerator.device
            path = folder / f"rollout_{self.accelerator.process_index}.safetensors"
            if not path.exists():
                raise ValueError(f"{folder} was written by a run of fewer processes: resume it with as many")
            if (folder / f"rollout_{self.accelerator.num_processes}.safetensors").exists():
                raise ValueError(f"{folder} was written by a run of more processes: resume it with as many")
            tensors = {name: value.to(device) for name, value in load_file(path).items()}
            self._buffered_inputs = unflat(tensors, counters["parts"], counters["absent"])


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
