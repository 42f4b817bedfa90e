"""Optimizer steps that have no gradient at all: nothing moves, whatever accelerates or shares the work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from adpo.trainers.engine import engine_of
from adpo.trainers.monitors.guards import gradients_are_finite


class EmptySteps(TrainerCallback):  # type: ignore[misc]
    """Makes a step without gradient the same everywhere.

    A gradient scaler takes such a step for a mistake in the program: after the passes one parameter gets a
    gradient of zeros, for the scaler to inspect; before the optimizer's step it is removed. Several processes
    average zeros, with which an optimizer moves by its momentum: they are removed, too; under DeepSpeed its engine
    keeps the optimizer at rest.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._parameter: Any = None
        self._has_gradient: bool | None = None  # the step at hand, in any process; None where nobody observed

    def observe(self, coefficients: Tensor) -> None:
        """What log-probabilities were multiplied with, in this process."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes > 1:
            some = (coefficients != 0).any().float().to(accelerator.device)
            here = bool(accelerator.reduce(some, reduction="sum") > 0)
            self._has_gradient = here or bool(self._has_gradient)
            if (engine := engine_of(accelerator)) is not None:
                engine.zeros = not self._has_gradient

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
        if self._has_gradient is False:
            self._remove_zeros()
        self._has_gradient = None

    def _remove_zeros(self) -> None:
        if gradients_are_finite(self.trainer):  # others are a matter of the guard
            for parameter in self.trainer.model.parameters():
                parameter.grad = None
