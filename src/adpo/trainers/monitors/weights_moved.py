"""Whether training has taught a model anything."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from adpo.trainers.monitors.gradient_monitor import GradientMonitor

log = logging.getLogger("adpo")
NOTE = "weights"
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsMoved(TrainerCallback):  # type: ignore[misc]
    """Compares the trained weights with those before the first step; a resumed run compares with its own start.

    ``moved`` is None before training has ended.
    """

    def __init__(self, trainer: Any, monitor: GradientMonitor) -> None:
        self.trainer, self.monitor = trainer, monitor
        self.moved: bool | None = None
        self._steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        notes = self.trainer.notes
        if not state.global_step or NOTE not in notes:
            notes[NOTE] = {"checksum": checksum(self.trainer.model, self.trainer.accelerator)}
            self.monitor.load_state_dict(GradientMonitor().state_dict())
        else:
            self.monitor.load_state_dict(notes[NOTE]["monitor"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """A checkpoint may be written after any step."""
        self.trainer.notes[NOTE]["monitor"] = self.monitor.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        before = self.trainer.notes[NOTE]["checksum"]
        self.moved = checksum(self.trainer.model, self.trainer.accelerator) != before
        self._steps = state.global_step
        if (verdict := self.verdict()) is not None:
            log.warning("%s", verdict)

    def verdict(self) -> str | None:
        """What a run that has taught nothing says of itself; None of any other."""
        count = self.monitor.steps_with_gradient
        if self.moved is None or (self.moved and (count or not self.monitor.steps)):
            return None
        if not self._steps:
            return "nothing was learnt: no optimizer step was made; see max_steps and num_train_epochs"
        if self.moved:  # by the decay of weights, or the momentum of steps before
            advice = self.monitor.advice()
            return f"nothing was learnt: no group had a gradient in {self._steps} optimizer steps{advice}"
        if count:
            why = f"; {count} of them had a gradient, but the learning rate was 0, or they were refused or undone"
        else:
            why = f": no group had a gradient{self.monitor.advice()}"
        return f"nothing was learnt: no weight changed in {self._steps} optimizer steps{why}"


@torch.no_grad()
def checksum(model: nn.Module, accelerator: Any) -> int:
    """Of the bits of all trained weights, over all processes."""
    total = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            total += _bits(parameter).to(total.device)
    if accelerator.num_processes > 1:
        total = accelerator.gather(total.reshape(1)).sum()
    return int(total)


def _bits(parameter: Any) -> Tensor:
    local = getattr(parameter, "ds_tensor", parameter)  # what this process holds of it under ZeRO-3, or FSDP2
    local = local.to_local() if hasattr(local, "to_local") else local
    words: Tensor = local.detach().contiguous().view(-1).view(WORDS[local.element_size()])
    return words.sum(dtype=torch.int64)
