"""Evaluation on the way: metrics and samples as JSON lines, the validation set, the best checkpoint kept."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from adpo.system.files import read_json
from adpo.trainers.checkpoints.model_card import write_card
from adpo.trainers.sharding import is_sharded
from adpo.runs.display import Display

log = logging.getLogger("adpo")
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
BEST, NOTE = "best", "validation.json"
VALIDATION = {"accuracy": "validation/accuracy", "reward": "validation/reward"}
"""The metric of the validation set: a share of right answers (or pairs), or the mean of a reward of one's own."""
REFUSED, UNDONE = "refused", "undone"
"""Counts of steps, shown where there are any."""
SHOWN = {
    "reward": "reward",
    "adpo/accuracy": "in order",
    "adpo/tau": "tau",
    "adpo/anchor_kl": "KL",
    "refused_steps": REFUSED,
    "adpo/steps_undone": UNDONE,
}
"""Metrics on the progress bar, and what they are called there; the KL is that to the anchor."""


class Watch(TrainerCallback):  # type: ignore[misc]
    """Writes every logged figure to ``metrics.jsonl``, shows some of them, and evaluates the model now and then.

    ``examine`` gives the mean score on the validation set; ``measure`` is what that is: accuracy or reward.
    """

    def __init__(
        self,
        trainer: Any,
        folder: Path,
        display: Display,
        examine: Callable[[Any], float] | None,
        every: int,
        stopped: Callable[[], bool] = lambda: False,
        measure: str = "accuracy",
    ) -> None:
        self.trainer, self.folder, self.display = trainer, folder, display
        self.examine, self.every, self.stopped, self.measure = examine, every, stopped, measure
        self.best, self.best_step = -math.inf, -1
        self._figures: dict[str, float | str | None] = {}
        self._recall()

    def _recall(self) -> None:
        """A run that is resumed knows its best checkpoint."""
        if self.trainer.accelerator.is_main_process:
            _settle(self.folder / BEST)
        self.trainer.accelerator.wait_for_everyone()
        note = self.folder / BEST / NOTE
        if note.exists():
            known = read_json(note, f"delete {note.parent} to go on without the best model so far")
            self.best, self.best_step = known["value"], known["step"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """A run that goes on from a checkpoint forgets what was logged after it."""
        for name in (METRICS, SAMPLES) if state.is_world_process_zero else ():
            path = self.folder / name
            if path.exists():
                noted = self.trainer.notes.get(_bytes(name), 0) if state.global_step else 0
                os.truncate(path, min(noted, path.stat().st_size))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if not state.is_world_process_zero:
            return
        self._append(METRICS, {"step": state.global_step, **(logs or {})})
        self._figures.update({name: logs[key] for key, name in SHOWN.items() if key in (logs or {})})
        for count in (REFUSED, UNDONE):
            self._figures[count] = self._figures.get(count) or None
        self.display.at(state.global_step, self._figures)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
            self.trainer.notes[_bytes(name)] = lines.tell()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.display.at(state.global_step, self._figures)
        if self.every and state.global_step % self.every == 0:
            self.look(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.every and state.global_step % self.every and not self.stopped():
            self.look(state)

    def look(self, state: Any) -> None:
        """Every process takes part; the main one keeps what is best."""
        if state.is_world_process_zero and hasattr(self.trainer, "sample_groups"):
            for group in self.trainer.sample_groups():
                self._append(SAMPLES, {"step": state.global_step, **group})
        if self.examine is None:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        try:
            value = self.examine(model)
        except ValueError as error:
            log.warning("step %d: no evaluation on the validation set: %s", state.global_step, error)
            return
        self._figures["validation"] = f"{100 * value:.0f} %" if self.measure == "accuracy" else value
        self.trainer.log({VALIDATION[self.measure]: value})
        self.display.at(state.global_step, self._figures, line=True)
        if value > self.best:
            self.best, self.best_step = value, state.global_step
            note = {"measure": self.measure, "value": value, "step": state.global_step}
            save(self.trainer, self.folder / BEST, note)


def _bytes(name: str) -> str:
    """The note of a checkpoint on how long a file was."""
    return f"{Path(name).stem}_bytes"


def save(trainer: Any, folder: Path, note: dict[str, Any] | None = None) -> None:
    """The model, whole or not at all, with a note on what it reached; what was there stays until then.

    Every process takes part; the main one writes.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = None
    if is_sharded(model):
        tied = getattr(model, "all_tied_weights_keys", None) or {}  # they come back as copies
        whole = trainer.accelerator.get_state_dict(trainer.model)
        weights = {name: value for name, value in whole.items() if name not in tied}
    if not trainer.accelerator.is_main_process:
        return
    part, old = _beside(folder)
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part, state_dict=weights)
    trainer.processing_class.save_pretrained(part)
    write_card(trainer, part)  # in place of the empty one of PEFT
    if note is not None:
        (part / NOTE).write_text(json.dumps(note) + "\n")
    _settle(folder)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _settle(folder: Path) -> None:
    """After an end between two renamings: the old one is the one."""
    _, old = _beside(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    """Where it is written, and where the one before waits."""
    return folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
