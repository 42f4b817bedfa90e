"""Stopping a run from outside: Ctrl-C, or the SIGTERM of a scheduler, ends it with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback


class StoppedError(Exception):
    """Training was stopped by a signal, with a checkpoint."""

    def __init__(self, step: int, stopped_by: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.stopped_by = stopped_by


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends training after the step at hand, with a checkpoint; asked a second time, at once."""

    def __init__(self, trainer: Any, say: Callable[[str], None]) -> None:
        self.trainer, self.say = trainer, say
        self.signal = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals mean this inside the block; a stop that was asked for is raised at its end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.signal:
            raise StoppedError(self.trainer.state.global_step, self.signal)

    def _hear(self, number: int, _: Any) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        self.say("stopping after this step, with a checkpoint (again: at once, without)")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        accelerator = self.trainer.accelerator
        asked = torch.tensor(self.signal, device=accelerator.device)
        if accelerator.num_processes > 1:  # all of them, or none
            asked = accelerator.reduce(asked.float(), reduction="sum")
            self.signal = self.signal or (signal.SIGINT if asked else 0)
        if asked:
            control.should_save = control.should_training_stop = True
