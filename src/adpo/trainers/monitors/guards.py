"""What keeps a run from being spoilt: optimizer steps that are refused, reward functions that may fail."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from adpo.trainers.engine import engine_of

log = logging.getLogger("adpo")


class TrainingStoppedError(RuntimeError):
    """Training cannot go on; the message says why, and where the last good checkpoint is."""


def gradients_are_finite(trainer: Any) -> bool:
    """In every process."""
    accelerator = trainer.accelerator
    gradients = [_local(p.grad) for p in trainer.model.parameters() if p.grad is not None]
    bad = torch.zeros((), device=accelerator.device)
    if gradients:
        bad += torch.stack([~torch.isfinite(gradient).all() for gradient in gradients]).any().to(bad)
    return float(accelerator.reduce(bad, reduction="sum")) == 0


class RefuseBadSteps(TrainerCallback):  # type: ignore[misc]
    """No optimizer step with a gradient that is not finite: parameters and optimizer stay as they were.

    After ``limit`` of them in a row training ends, with a checkpoint of the model as it was before the first.
    Works with any trainer of transformers. Under fp16 the gradient scaler skips such steps itself, and halves its
    scale: they are counted as refused, and limited once there is no scale left to halve.
    """

    def __init__(self, trainer: Any, limit: int) -> None:
        self.trainer, self.limit = trainer, limit
        self.refused = self.in_a_row = 0
        self.stopped: str | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        accelerator = self.trainer.accelerator
        scaler = accelerator.scaler
        engine = engine_of(accelerator)  # which has made its step by now, or refused it
        if gradients_are_finite(self.trainer) if engine is None else not engine.refused:
            self.in_a_row = 0
        else:
            self.refused += 1
            if scaler is None or scaler.get_scale() <= 1:
                self.in_a_row += 1
            for parameter in self.trainer.model.parameters() if scaler is None else ():
                parameter.grad = None
            log.warning(
                "step %d refused: its gradient is not finite%s (%d so far, %d in a row%s)",
                state.global_step + 1,
                "" if scaler is None else f", scaled by {scaler.get_scale():g}",
                self.refused,
                self.in_a_row,
                "" if scaler is None else " without a scale to halve",
            )
        self.trainer._metrics["train"]["refused_steps"] = [float(self.refused)]  # a count: not to be averaged

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop_if_over(args, state, control)

    def stop_if_over(self, args: Any, state: Any, control: Any) -> None:
        if self.in_a_row >= self.limit and self.stopped is None:
            self.stopped = (
                f"{self.in_a_row} optimizer steps in a row had a gradient that is not finite; last good "
                f"checkpoint: {args.output_dir}/checkpoint-{state.global_step}"
            )
            control.should_save = control.should_training_stop = True

    def state_dict(self) -> dict[str, int]:
        return {"refused": self.refused, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.refused, self.in_a_row = state["refused"], state["in_a_row"]

    def complain(self) -> None:
        """To be called when training has ended."""
        if self.stopped is not None:
            raise TrainingStoppedError(self.stopped)


def _local(gradient: Any) -> Any:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


class GuardedRewards:
    """Reward functions whose failure leaves its completions out instead of ending the run.

    A function that raises, or a reward that is not finite, gives None: TRL's word for "no reward". Such a
    completion is no member of its group, though other functions may have rewarded it (``lost``). ``limit``
    failures in a row end the run. A wrong number of rewards, or one that is not a number, is a mistake in the
    program and ends it at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.failures = self.not_finite = 0
        self.lost: set[int] = set()  # rows whose reward, or a part of it, is not known; whoever asks clears it
        self._in_a_row: dict[str, int] = {}

    def wrap(self, functions: Any) -> Any:
        if isinstance(functions, Sequence) and not isinstance(functions, str):
            return [self._one(function) for function in functions]
        return self._one(functions)

    def _one(self, function: Any) -> Any:
        if not callable(function) or isinstance(function, str | nn.Module):
            return function  # a reward model, by name or at hand
        name = getattr(function, "__name__", type(function).__name__)
        call = function.__call__ if not hasattr(function, "__name__") else function
        if _is_async(function):

            @functools.wraps(call)
            async def asynchronous(completions: Sequence[Any], **rest: Any) -> list[float | None]:
                try:
                    values = await function(completions=completions, **rest)
                except (Exception, SystemExit) as error:
                    return self._failed(name, error, len(completions))
                return self._checked(name, values)

            guarded: Callable[..., Any] = asynchronous
        else:

            @functools.wraps(call)
            def synchronous(completions: Sequence[Any], **rest: Any) -> list[float | None]:
                try:
                    values = function(completions=completions, **rest)
                except (Exception, SystemExit) as error:
                    return self._failed(name, error, len(completions))
                return self._checked(name, values)

            guarded = synchronous
        guarded.__name__ = name
        return guarded

    def _failed(self, name: str, error: BaseException, rows: int) -> list[float | None]:
        self.failures += 1
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if self._in_a_row[name] >= self.limit:
            raise TrainingStoppedError(
                f"reward function {name} failed {self._in_a_row[name]} times in a row, last with {line}"
            ) from error
        log.warning("reward function %s failed with %s: %d completions are left out", name, line, rows)
        self.lost.update(range(rows))
        return [None] * rows

    def _checked(self, name: str, values: Any) -> list[float | None]:
        self._in_a_row[name] = 0
        try:
            numbers = [None if value is None else float(value) for value in values]
        except (TypeError, ValueError):
            raise ValueError(
                f"reward function {name} must return one number or None per completion; got {values!r:.200}"
            ) from None
        odd = [row for row, value in enumerate(numbers) if value is not None and not math.isfinite(value)]
        if odd:
            self.not_finite += len(odd)
            self.lost.update(odd)
            log.warning("reward function %s gave %d rewards that are not finite: left out", name, len(odd))
        return [number if number is None or math.isfinite(number) else None for number in numbers]


def _is_async(function: Any) -> bool:
    import inspect

    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
