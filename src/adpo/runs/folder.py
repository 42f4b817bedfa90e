"""The folder of a run: refused where it would overwrite, found again where a run goes on."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from adpo.system.files import digest, write_json, write_text
from adpo.trainers.checkpoints import checkpoint_files as checkpoints

SETTINGS, ORIGIN, BEFORE = "settings.json", "origin.json", "before.json"
STARTED = (SETTINGS, ORIGIN, BEFORE)
"""What a run writes before its first step."""
METRICS, TENSORBOARD = "metrics.jsonl", "runs"
OWN = {"train": "dev_problems", "prefer": "dev_lists"}
DIGESTS = "files"  # the key of what tells the contents of data files apart


class Asked(Protocol):
    """A run as it was asked for."""

    def described(self) -> dict[str, Any]: ...


A = TypeVar("A", bound=Asked)


@dataclass(frozen=True)
class Ordered(Generic[A]):
    """Where a run goes and how it begins."""

    asked: A
    out: Path
    seed: int = 0
    resume: bool = False
    started: float = field(default_factory=time.monotonic)


def known_settings(folder: Path, command: str) -> dict[str, Any]:
    """The settings of this command's run in a folder, its seed among them; {} if there is none."""
    known = noted_settings(folder)
    theirs = command_of(known)
    if theirs not in (None, command):
        raise ValueError(f"{folder} holds a run of adpo {theirs}: resume it with that, or choose another --out")
    return known


def noted_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run of any command; {} if there is none."""
    note = folder / SETTINGS
    if not note.is_file():
        return {}
    known = _read(note)
    known.pop(DIGESTS, None)
    return known


def command_of(known: Mapping[str, Any]) -> str | None:
    """Which command settings are of, by a setting that no other has; None where nobody knows."""
    return next((command for command, name in OWN.items() if name in known), None)


def _read(note: Path) -> dict[str, Any]:
    try:
        known = json.loads(note.read_text())
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict):
        raise ValueError(f"{note} cannot be read: the run in {note.parent} cannot be resumed or evaluated")
    return known


def check_folder(order: Ordered[Any]) -> Path | None:
    """See that nothing would be lost, and that the run can be written; the checkpoint to go on from.

    Nothing is written, and nothing is resumed that is damaged, another run's, or about other data.
    """
    folder, note = order.out, order.out / SETTINGS
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; expected a folder")
    found = None
    if folder.exists() and any(not _leftover(path) for path in folder.iterdir()):
        if not order.resume:
            if note.exists() and not has_begun(folder):
                raise ValueError(
                    f"{folder} holds a run that made no step: add --resume to begin it again (other settings are "
                    "taken), or choose another --out"
                )
            raise ValueError(f"{folder} is not empty: add --resume to go on with its run, or choose another --out")
        if not note.exists():
            raise ValueError(f"--resume: {folder} holds no run of adpo")
        if has_begun(folder):
            _compare(order, _read(note))
        found = checkpoints.newest(folder)
        if found is not None:
            checkpoints.verify(found, identity(order))
    checkpoints.check_writable(folder)
    return found


def _leftover(path: Path) -> bool:
    """What a process that was killed before its run had begun may have left."""
    return path.name.startswith(checkpoints.PROBE) or path.name == f"{SETTINGS}.part"


def has_begun(folder: Path) -> bool:
    """Whether the run in a folder has anything to go on from: a step that was logged, a checkpoint, a model."""
    if any((folder / name).exists() for name in ("best", "model", "summary.json")):
        return True
    metrics = folder / METRICS
    return checkpoints.newest(folder) is not None or (metrics.exists() and metrics.stat().st_size > 0)


@contextmanager
def without_failed_starts(folder: Path, main: bool = True) -> Iterator[None]:
    """A start that fails before its first step leaves nothing behind: the next try may have the same folder.

    A run that was there before stays, and so does one that was stopped from outside.
    """
    there, note = folder.exists(), folder / SETTINGS
    fresh = main and not note.exists()
    try:
        yield
    except Exception:
        if fresh and note.exists() and not has_begun(folder):
            for name in (*STARTED, METRICS):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / TENSORBOARD, ignore_errors=True)
            if not there:
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
        raise


def as_it_was(folder: Path, ours: A, theirs: A, defaults: Mapping[str, Any]) -> A:
    """The settings of the run in a folder, where ours are the same; a difference is named with both values.

    What was not set is what it is by default. A run that made no step may have other settings.
    """
    if not has_begun(folder):
        return ours
    mine, known = ({**defaults, **each.described()} for each in (ours, theirs))
    for name in (name for name in mine if name in known and mine[name] != known[name]):
        raise other_settings(folder, name, known[name], mine[name])
    return theirs


def other_settings(folder: Path, name: str, known: Any, given: Any) -> ValueError:
    return ValueError(
        f"{folder} holds a run with other settings ({name}: {known!r}, not {given!r}): resume it as it was, or "
        "choose another --out"
    )


def open_folder(order: Ordered[Any], origin: dict[str, str]) -> None:
    """Make it, and note what was asked for, and where a run comes from when it begins."""
    order.out.mkdir(parents=True, exist_ok=True)
    note, noted = order.out / SETTINGS, _noted(order)
    if note.exists() and note.read_text() != noted:  # a run without a step, begun again with other settings
        for name in STARTED[1:]:
            (order.out / name).unlink(missing_ok=True)
    write_text(note, noted)  # first: from here on the run can be resumed
    if not (order.out / ORIGIN).exists():
        write_json(order.out / ORIGIN, origin)


def how_to_go_on(command: str, folder: Path, stopped: str) -> str:
    """What to tell who stopped a run."""
    if not (folder / SETTINGS).exists():
        return f"{stopped or 'stopped'} before anything was written: nothing to go on with"
    return f"{stopped or 'stopped'}; go on with: adpo {command} --out {shlex.quote(str(folder))} --resume"


def identity(order: Ordered[Any]) -> str:
    """What a checkpoint must share with the run that goes on from it."""
    return hashlib.sha256(_noted(order).encode()).hexdigest()[:16]


def _noted(order: Ordered[Any]) -> str:
    return json.dumps({**_settings(order), DIGESTS: _digests(order)}, indent=1, sort_keys=True) + "\n"


def _settings(order: Ordered[Any]) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(json.dumps({**order.asked.described(), "seed": order.seed}))
    return described


def _digests(order: Ordered[Any]) -> dict[str, str]:
    named = {name: _settings(order).get(name) for name in ("data", "eval_data")}
    return {name: digest(Path(path)) for name, path in named.items() if path and Path(path).is_file()}


def _compare(order: Ordered[Any], known: dict[str, Any]) -> None:
    digests, ours, theirs = known.pop(DIGESTS, {}), _settings(order), known
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs or ours[name] != theirs[name]:
            raise other_settings(order.out, name, theirs.get(name), ours.get(name))
    now = _digests(order)
    for name in sorted({*digests, *now}):
        if digests.get(name) != now.get(name):
            raise ValueError(
                f"{ours.get(name)} has changed since the run in {order.out} began: resume it with the file as it "
                "was, or choose another --out"
            )
