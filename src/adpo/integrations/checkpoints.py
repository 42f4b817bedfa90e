"""Checkpoints that can be trusted: whole or not there, of this run and no other, unchanged since.

`SafeCheckpoints` goes in front of any trainer of transformers. A checkpoint is written under a temporary name,
gets a manifest of its files with their digests, reaches the disk, and is renamed. Before a run goes on from one,
its manifest is held against its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from adpo.anchors import Snapshot as Self
from adpo.integrations.arguments import check_model, check_processes
from adpo.integrations.guards import TrainingStoppedError
from adpo.integrations.model_card import CardFacts, write_card
from adpo.integrations.quantised import keep_differentiable
from adpo.ranks import processes

MANIFEST = "manifest.json"
NOTES = "notes.json"
PREFIX = "checkpoint-"
PART = ".checkpoint.part"  # what is being written
OLD = ".checkpoint.old"  # what is being deleted
PROBE = ".adpo-probe-"  # what shows that a folder can be written to
MIB = 2**20


class SafeCheckpoints:
    """In front of a `transformers.Trainer`: its checkpoints appear whole or not at all.

    Subclasses keep more in a checkpoint by `_save_own` and `_load_own`; ``notes`` is for what others want kept.
    """

    run_identity = ""  # of settings and data; a checkpoint of another run is refused
    _part: Path | None = None  # the folder checkpoints go to while one is written

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.notes: dict[str, Any] = {}
        self.card_facts = CardFacts()
        self._earlier_loss: float | None = None  # summed over the steps before a checkpoint that is gone on from
        check_model(arguments[0] if arguments else options.get("model"))
        super().__init__(*arguments, **options)
        check_processes(self)
        keep_differentiable(self.model)  # type: ignore[attr-defined]

    def _save_own(self: Any, folder: Path) -> None:
        """What a checkpoint holds besides; called in every process."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save:
            (folder / NOTES).write_text(json.dumps({"notes": self.notes, "loss": self._total_loss_scalar}) + "\n")

    def _load_own(self, folder: Path) -> None:
        """Called in every process, after model and optimizer."""
        kept = json.loads((folder / NOTES).read_text())
        self.notes, self._earlier_loss = kept["notes"], kept["loss"]

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
        """About what a checkpoint takes: the weights that are saved, two moments each, and what anchors keep."""
        model = self.accelerator.unwrap_model(self.model)
        shadows = sum(v.nbytes for policy in self._kept_policies.values() for v in policy.shadow.values())
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        saved = trained if hasattr(model, "peft_config") else sum(p.nbytes for p in model.parameters())
        return int(saved + 2 * trained + shadows)

    @property
    def _kept_policies(self) -> dict[str, Self]:
        """The anchors that a checkpoint keeps, by name."""
        return {}

    @property
    def _had_ended(self: Any) -> bool:
        """Whether the checkpoint that is gone on from is that of the last step."""
        return bool(self.state.global_step >= self.state.max_steps)

    def _run_epoch(self: Any, *arguments: Any, **options: Any) -> None:
        """As in transformers, which would make one more step than the last; and the mean loss is that of all."""
        if self._earlier_loss is not None:
            self._total_loss_scalar, self._initial_global_step = self._earlier_loss, 0
            self._earlier_loss = None
        if self._had_ended or self.control.should_training_stop:
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
            self._save_own(self._part / name)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._name_best(root, self._part / name)
                write_card(self, self._part / name)
                seal(self._part / name, self.run_identity, self.state.global_step)
                _put(self._part / name, root / name)
        except (OSError, RuntimeError, SafetensorError) as error:  # libraries wrap what the system said
            shutil.rmtree(root / PART, ignore_errors=True)
            raise TrainingStoppedError(_unwritten(root, self.state.global_step, error)) from error
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
            self._load_own(Path(checkpoint))


def seal(folder: Path, run: str, step: int) -> None:
    """Write the manifest, and see that all of it is on the disk."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): _described(path) for path in found}
    known = {"run": run, "step": step, "processes": processes(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(known, indent=1) + "\n")
    for path in [*found, folder / MANIFEST, folder]:
        _flush(path)


def verify(folder: Path, run: str = "") -> None:
    """Complain, in one line, about a checkpoint that is not whole, was changed, or is another run's."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not there: there is no such checkpoint")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, theirs = dict(manifest["files"]), str(manifest["run"])
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {MANIFEST}: it was not written by adpo, or not to its end") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(_damaged(folder, MANIFEST, "it cannot be read")) from None
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(_damaged(folder, name, "it is missing"))
        if path.stat().st_size != known["bytes"]:
            raise ValueError(_damaged(folder, name, f"{path.stat().st_size} bytes instead of {known['bytes']}"))
        if _described(path) != known:
            raise ValueError(_damaged(folder, name, "its content was changed"))
    if run and theirs != run:
        raise ValueError(f"{folder} is a checkpoint of another run (other settings or data): not resumed")
    before, now = manifest.get("processes", processes()), processes()
    if before != now:  # they would be dealt other rows, and hold other parts of a rollout
        raise ValueError(f"{folder} was written by {before} processes, not {now}: resume it with as many")


def check_resumable(folder: Path) -> None:
    """Complain about a checkpoint without the optimizer's state: transformers would begin a new one silently."""
    if not any(folder.glob("optimizer*")) and not any(folder.glob("global_step*")):
        raise ValueError(
            f"{folder} holds no state of the optimizer (save_only_model): it cannot be resumed; begin a run with "
            "it as its model"
        )


def newest(root: Path) -> Path | None:
    """The latest checkpoint in a run's folder."""
    found = [path for path in root.glob(f"{PREFIX}*") if path.is_dir() and path.name[len(PREFIX) :].isdigit()]
    return max(found, key=_step, default=None)


def rotate(root: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest ones over the limit; each disappears whole."""
    shutil.rmtree(root / OLD, ignore_errors=True)
    if not limit or limit < 1:
        return
    found = sorted((p for p in root.glob(f"{PREFIX}*") if p.name[len(PREFIX) :].isdigit()), key=_step)
    kept = [path for path in found[:-1] if best is None or path != Path(best)]
    for path in kept[: max(0, len(found) - limit)]:
        path.rename(root / OLD)
        shutil.rmtree(root / OLD, ignore_errors=True)


def check_room(root: Path, needed: int) -> None:
    """Complain now, not after hours of training, where a checkpoint cannot be written."""
    check_writable(root)
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < 2 * needed:  # a new one is written before an old one goes
        raise ValueError(
            f"{root} has {free / MIB:,.0f} MiB free and a checkpoint takes about {needed / MIB:,.0f}, twice while "
            "an old one is replaced: free some space, or choose another folder"
        )


def check_writable(root: Path) -> None:
    """See that files can be written to a folder, which need not be there yet; nothing is left behind."""
    probe = root / f"{PROBE}{os.getpid()}"
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(4096))
        _flush(probe)
    except OSError as error:
        raise ValueError(f"{root} cannot be written to: {error.strerror or error}") from None
    finally:
        if probe.exists():
            probe.unlink()
        for folder in made:
            if folder.exists():
                folder.rmdir()


def _put(part: Path, place: Path) -> None:
    """A checkpoint of the same step is there when a run passes it a second time."""
    if place.exists():
        shutil.rmtree(place.parent / OLD, ignore_errors=True)
        place.rename(place.parent / OLD)
    part.rename(place)
    _flush(place.parent)
    shutil.rmtree(place.parent / OLD, ignore_errors=True)


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step(path: Path) -> int:
    return int(path.name[len(PREFIX) :])


def _damaged(folder: Path, name: str, what: str) -> str:
    return f"{folder} is damaged ({name}: {what}): delete that folder to go on from the checkpoint before it"


def _unwritten(root: Path, step: int, error: Exception) -> str:
    found = newest(root)
    last = f"{found.name} is whole" if found is not None else "there is none yet"
    reason = " ".join(str(error).split())[:200]
    return f"the checkpoint of step {step} could not be written to {root} ({reason}); of the earlier ones, {last}"
