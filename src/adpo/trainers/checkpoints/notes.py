"""What others have seen of a run, as a part of its checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback

NOTE = "parts"


class Stateful(Protocol):
    """What goes on from where it was; its state is what JSON holds."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Noted(TrainerCallback):  # type: ignore[misc]
    """Keeps the states of some parts in the notes of a trainer with `SafeCheckpoints`; to be added after them."""

    def __init__(self, trainer: Any, **parts: Stateful) -> None:
        self.trainer, self.parts = trainer, parts

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        known = self.trainer.notes.get(NOTE, {}) if state.global_step else {}
        for name in known.keys() & self.parts.keys():
            self.parts[name].load_state_dict(known[name])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Whoever asks for a checkpoint may do so later."""
        known = self.trainer.notes.setdefault(NOTE, {})
        known.update({name: part.state_dict() for name, part in self.parts.items()})
