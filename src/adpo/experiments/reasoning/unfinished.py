"""Trials that take hours: what they have measured is part of their checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback

NOTE = "trial"


class Stateful(Protocol):
    """What goes on from where it was."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Noted(TrainerCallback):  # type: ignore[misc]
    """Keeps the states of some parts in the notes of a trainer's checkpoints; to be added after them."""

    def __init__(self, trainer: Any, parts: dict[str, Stateful]) -> None:
        self.trainer, self.parts = trainer, parts

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        for name, part in self.parts.items() if state.global_step else ():
            part.load_state_dict(self.trainer.notes[NOTE][name])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if control.should_save:
            self.trainer.notes[NOTE] = {name: part.state_dict() for name, part in self.parts.items()}
