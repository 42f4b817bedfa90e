"""The order of the data: a matter of seed and epoch alone, whether or not a run was stopped in between."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback


class EpochShuffle(Sampler[int]):
    """Every row once, in an order of its own in every epoch."""

    def __init__(self, rows: Sized, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(self.rows), generator=self.generator).tolist()

    def __len__(self) -> int:
        return len(self.rows)


class StartEpoch(TrainerCallback):  # type: ignore[misc]
    """Sets the generator of the trainer's sampler at the start of every epoch."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        sampler = self.trainer.train_sampler
        if sampler is not None and getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(sampler.seed + int(state.epoch or 0))
