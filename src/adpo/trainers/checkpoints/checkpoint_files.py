"""The files of checkpoints that can be trusted: a manifest with their digests, of this run and no other.

`adpo.trainers.checkpoints.safe_checkpoints` has the trainers that write them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adpo.deprecated import renamed
from adpo.system.ranks import processes

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
PART = ".checkpoint.part"  # what is being written
OLD = ".checkpoint.old"  # what is being deleted
PROBE = ".adpo-probe-"  # what shows that a folder can be written to
MIB = 2**20


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


def put(part: Path, place: Path) -> None:
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


def unwritten(root: Path, step: int, error: Exception) -> str:
    found = newest(root)
    last = f"{found.name} is whole" if found is not None else "there is none yet"
    reason = " ".join(str(error).split())[:200]
    return f"the checkpoint of step {step} could not be written to {root} ({reason}); of the earlier ones, {last}"


if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
