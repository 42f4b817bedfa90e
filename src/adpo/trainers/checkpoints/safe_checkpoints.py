"""Trainers whose checkpoints can be trusted: whole or not there, of this run and no other, unchanged since.

`SafeCheckpoints` goes in front of any trainer of transformers. A checkpoint is written under a temporary name,
gets a manifest of its files with their digests, reaches the disk, and is renamed. Before a run goes on from one,
its manifest is held against its files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from adpo.trainers.checkpoints.checkpoint_files import (
    PART,
    PREFIX,
    check_resumable,
    check_room,
    newest,
    put,
    rotate,
    seal,
    unwritten,
    verify,
)
from adpo.trainers.checkpoints.model_card import CardFacts, write_card
from adpo.trainers.checks.arguments import check_model, check_processes
from adpo.trainers.checks.quantised import keep_differentiable
from adpo.trainers.monitors.guards import TrainingStoppedError

NOTES = "notes.json"


class CheckpointPart(Protocol):
    """Something that a checkpoint holds beside model and optimizer."""

    def save(self, folder: Path, main: bool) -> None:
        """Called in every process; ``main`` in the one that writes what all have in common."""

    def load(self, folder: Path) -> None:
        """Called in every process, after model and optimizer."""

    def size(self) -> int:
        """About how many bytes `save` writes."""


class SafeCheckpoints:
    """In front of a `transformers.Trainer`: its checkpoints appear whole or not at all.

    ``checkpoint_parts`` are saved and loaded in their order; ``notes`` is for what others want kept as JSON.
    """

    run_identity = ""  # of settings and data; a checkpoint of another run is refused
    _part: Path | None = None  # the folder checkpoints go to while one is written

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.notes: dict[str, Any] = {}
        self.checkpoint_parts: list[CheckpointPart] = []
        self.card_facts = CardFacts()
        self._earlier_loss: float | None = None  # summed over the steps before a checkpoint that is gone on from
        check_model(arguments[0] if arguments else options.get("model"))
        super().__init__(*arguments, **options)
        check_processes(self)
        keep_differentiable(self.model)  # type: ignore[attr-defined]

    def _save_parts(self: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            (folder / NOTES).write_text(json.dumps({"notes": self.notes, "loss": self._total_loss_scalar}) + "\n")
        for part in self.checkpoint_parts:
            part.save(folder, self.args.should_save)

    def _load_parts(self, folder: Path) -> None:
        saved = json.loads((folder / NOTES).read_text())
        self.notes, self._earlier_loss = saved["notes"], saved["loss"]
        for part in self.checkpoint_parts:
            part.load(folder)

    def train(self: Any, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """As in transformers; a checkpoint to go on from is looked through first."""
        if resume_from_checkpoint is True:
            found = newest(Path(self.args.output_dir))
            if found is None:
                raise ValueError(f"{self.args.output_dir} holds no checkpoint to go on from")
            resume_from_checkpoint = str(found)
        if resume_from_checkpoint:
            verify(Path(resume_from_checkpoint), self.run_identity)
            check_resumable(Path(resume_from_checkpoint))
        if self.args.should_save and self.args.save_strategy != "no":
            check_room(Path(self.args.output_dir), self._checkpoint_bytes())
        return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **options)  # type: ignore[misc]

    def _checkpoint_bytes(self: Any) -> int:
        """About what a checkpoint takes: the weights that are saved, two moments each, and the parts."""
        model = self.accelerator.unwrap_model(self.model)
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        saved = trained if hasattr(model, "peft_config") else sum(p.nbytes for p in model.parameters())
        return int(saved + 2 * trained + sum(part.size() for part in self.checkpoint_parts))

    @property
    def _is_finished(self: Any) -> bool:
        """Whether the checkpoint that is gone on from is that of the last step."""
        return bool(self.state.global_step >= self.state.max_steps)

    def _run_epoch(self: Any, *arguments: Any, **options: Any) -> None:
        """As in transformers, which would make one more step than the last; and the mean loss is that of all."""
        if self._earlier_loss is not None:
            self._total_loss_scalar, self._initial_global_step = self._earlier_loss, 0
            self._earlier_loss = None
        if self._is_finished or self.control.should_training_stop:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **options)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self: Any, *arguments: Any, **options: Any) -> None:
        """What is due to be logged is logged before a checkpoint: no average is pending in it."""
        if self.control.should_save:
            self.control.should_log = True
        super()._maybe_log_save_evaluate(*arguments, **options)  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        found: str = super()._get_output_dir(trial=trial)  # type: ignore[misc]
        return str(self._part) if self._part is not None else found

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._part is None:  # otherwise later, under its own name
            self.create_model_card()
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def create_model_card(
        self: Any, model_name: str | None = None, dataset_name: str | None = None, *_: Any, **__: Any
    ) -> None:
        """Our own, in place of that of TRL or transformers."""
        if self.is_world_process_zero():
            write_card(self, Path(self.args.output_dir), model_name, dataset_name)

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        root = Path(self._get_output_dir(trial=trial))
        name = f"{PREFIX}{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(root / PART, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._part = root / PART
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            self._save_parts(self._part / name)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._name_best(root, self._part / name)
                write_card(self, self._part / name)
                seal(self._part / name, self.run_identity, self.state.global_step)
                put(self._part / name, root / name)
        except (OSError, RuntimeError, SafetensorError) as error:  # libraries wrap what the system said
            shutil.rmtree(root / PART, ignore_errors=True)
            raise TrainingStoppedError(unwritten(root, self.state.global_step, error)) from error
        finally:
            self._part = None
        if self.args.should_save:
            shutil.rmtree(root / PART, ignore_errors=True)
            rotate(root, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(root / name))

    def _name_best(self: Any, root: Path, folder: Path) -> None:
        """The best checkpoint under the name it will have."""
        step = self.state.best_global_step
        if step:
            place = root / f"{PREFIX}{step}"
            if place.is_dir() or place.name == folder.name:
                self.state.best_model_checkpoint = str(place)
                self.state.save_to_json(str(folder / "trainer_state.json"))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self._load_parts(Path(checkpoint))
