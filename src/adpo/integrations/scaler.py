"""Gradient scaling (fp16) in steps that have no gradient at all."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback


class EmptySteps(TrainerCallback):  # type: ignore[misc]
    """Lets a gradient scaler pass a step without gradient, which it takes for a mistake in the program.

    After the passes one parameter gets a gradient of zeros, for the scaler to inspect; before the optimizer's step
    it is removed, so that nothing moves, as without a scaler.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._parameter: Any = None

    def after_passes(self) -> None:
        """To be called at the end of a training step."""
        accelerator = self.trainer.accelerator
        if accelerator.scaler is None or not accelerator.sync_gradients:
            return
        groups = self.trainer.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        if parameters and all(parameter.grad is None for parameter in parameters):
            self._parameter = parameters[0]
            self._parameter.grad = torch.zeros_like(self._parameter)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self._parameter is not None:
            self._parameter.grad = self._parameter = None
