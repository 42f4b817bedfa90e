"""Preference lists as token ids in a file on disk, made once and read from there row by row.

    table = build("lists.jsonl", tokenizer, Path("cache"), max_length=1024)
    table[0]          # {"prompt_ids": [...], "completion_ids": [[...], ...], "rewards": [...], "index": 0}

Rows pass through in batches, so memory does not grow with their number. The file is known by all that decides what
is in it: data, tokenizer and settings. It gets its name when it is whole, beside a note of its SHA-256, and it is
made anew if it was cut off or damaged since.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import compute

from adpo.core.ties import all_tied
from adpo.preferences.reading import (
    BadRow,
    BadRows,
    BadRowsError,
    Counts,
    Rows,
    digest,
    opened,
    validate,
)
from adpo.preferences.tokens import Batch, TokenizedList, batches, identity

__all__ = ["BadRowsError", "Counts", "PreferenceTable", "Tally", "build", "validate"]

FORMAT = 2  # of the file; another one makes every table anew
SCHEMA = pa.schema(
    {
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.list_(pa.int32())),
        "rewards": pa.list_(pa.float64()),
        "prompt_key": pa.string(),
    }
)


@dataclass
class Tally:
    """What became of the rows."""

    rows: int = 0  # lists in the table
    completions: int = 0  # of all lists together
    tied: int = 0  # lists without a preference: all rewards are equal
    skipped: int = 0  # bad rows
    truncated: int = 0  # completions that lost their end to max_length
    too_long: int = 0  # lists left out, for their prompt leaves no room


class PreferenceTable:
    """Lists of token ids, memory-mapped; a map-style dataset of torch."""

    def __init__(self, data: pa.Table, tally: Tally, fingerprint: str, rows: Sequence[int] | None = None) -> None:
        self.fingerprint = fingerprint
        self.tally = tally
        self._data = data
        self._rows = range(data.num_rows) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One list; ``index`` is its position here, also where this is a selection."""
        row = self._rows[index]
        return {
            "prompt_ids": self._data["prompt_ids"][row].values.to_pylist(),
            "completion_ids": self._data["completion_ids"][row].values.to_pylist(),
            "rewards": self._rewards(row),
            "index": operator.index(index) % len(self),
        }

    def select(self, indices: Sequence[int]) -> PreferenceTable:
        """Some of the lists, in this order, with a fingerprint of their own; nothing is copied."""
        chosen = [operator.index(index) for index in indices]
        rows = [self._rows[index] for index in chosen]
        tally = replace(
            self.tally,
            rows=len(rows),
            completions=sum(self._sizes[row] for row in rows),
            tied=sum(all_tied(rewards) for rewards in map(self._rewards, rows)),
        )
        return PreferenceTable(self._data, tally, _hash([self.fingerprint, chosen]), rows)

    @property
    def sizes(self) -> list[int]:
        """The number of completions of every list."""
        return [self._sizes[row] for row in self._rows]

    @property
    def prompt_keys(self) -> list[str]:
        """What tells the prompts of the lists apart."""
        keys = self._data["prompt_key"].to_pylist()
        return [keys[row] for row in self._rows]

    @property
    def completions(self) -> int:
        return self.tally.completions

    @property
    def tied(self) -> int:
        return self.tally.tied

    @property
    def skipped(self) -> int:
        return self.tally.skipped

    @property
    def truncated(self) -> int:
        return self.tally.truncated

    @property
    def too_long(self) -> int:
        return self.tally.too_long

    @cached_property
    def _sizes(self) -> list[int]:
        return compute.list_value_length(self._data["completion_ids"]).to_pylist()  # type: ignore[no-any-return]

    def _rewards(self, row: int) -> list[float]:
        return self._data["rewards"][row].values.to_pylist()  # type: ignore[no-any-return]


def _quiet(_: int) -> None:
    """Progress that nobody hears of."""


def build(
    source: Rows,
    tokenizer: Any,
    folder: Path,
    *,
    max_length: int | None = None,
    skip_bad: bool = False,
    split: str = "train",
    config: str | None = None,
    chat: Mapping[str, Any] | None = None,
    on_progress: Callable[[int], None] = _quiet,
) -> PreferenceTable:
    """The table of these rows, from ``folder`` if it is there already.

    ``max_length`` is that of prompt and completion together: the end of a longer completion is cut off, and a list
    whose prompt leaves no room is left out. Bad rows are an error that names them all, or with ``skip_bad`` left
    out and counted. ``chat`` are arguments of the chat template; ``on_progress`` hears how many rows were read.
    """
    if max_length is not None and max_length < 2:
        raise ValueError(
            f"max_length must be at least 2, a token of prompt and one of completion; got {max_length}"
        )
    data, chat = opened(source, split, config), dict(chat or {})
    options = {"max_length": max_length, "skip_bad": skip_bad, "chat": chat}
    key = _hash([FORMAT, data.digest(), identity(tokenizer), options])
    path = Path(folder) / f"preferences-{key}.arrow"
    found = _stored(path, key)
    if found is not None:
        return found
    with _unfinished(path) as part:
        tally, bad = _write(part, batches(data.rows(), tokenizer, chat), max_length, on_progress)
        _refuse(tally, bad, data.name or "the data", skip_bad)
        with _unfinished(_note(path)) as note:
            note.write_text(json.dumps({"sha256": digest(part), **asdict(tally)}))
            note.replace(_note(path))
        part.replace(path)
    return PreferenceTable(_mapped(path), tally, key)


def _write(
    path: Path, of_rows: Iterable[Batch], max_length: int | None, on_progress: Callable[[int], None]
) -> tuple[Tally, BadRows]:
    tally, bad, read = Tally(), BadRows(), 0
    with pa.ipc.new_file(str(path), SCHEMA) as file:
        for batch in of_rows:
            for row in batch:
                if isinstance(row, BadRow):
                    bad.add(row)
            lists = _that_fit([row for row in batch if isinstance(row, TokenizedList)], max_length, tally)
            if lists:
                columns = zip(*lists, strict=True)
                file.write_batch(pa.record_batch(list(map(pa.array, columns, SCHEMA.types)), schema=SCHEMA))
            read += len(batch)
            on_progress(read)
    tally.skipped = bad.count
    return tally, bad


def _that_fit(lists: Sequence[TokenizedList], max_length: int | None, tally: Tally) -> list[TokenizedList]:
    """The lists without what goes beyond ``max_length``, counted as they go by."""
    kept = []
    for row in lists:
        room = None if max_length is None else max_length - len(row.prompt_ids)
        if room is not None and room <= 0:
            tally.too_long += 1
            continue
        kept.append(row._replace(completion_ids=[ids[:room] for ids in row.completion_ids]))
        tally.rows += 1
        tally.completions += len(row.completion_ids)
        tally.tied += all_tied(row.rewards)
        tally.truncated += sum(room is not None and len(ids) > room for ids in row.completion_ids)
    return kept


def _refuse(tally: Tally, bad: BadRows, name: str, skip_bad: bool) -> None:
    """A table with bad rows that were not to be skipped, or with nothing in it."""
    if bad.count and not skip_bad:
        raise BadRowsError(bad)
    if not tally.rows and not tally.too_long:
        raise ValueError(f"all rows of {name} are bad ({bad.count}), such as: {bad.first[0]}")
    if not tally.rows:
        raise ValueError(f"no prompt of {name} leaves room for a completion within max_length")


def _stored(path: Path, key: str) -> PreferenceTable | None:
    """The table of an earlier time, if it is there and as it was written."""
    try:
        note = json.loads(_note(path).read_text())
        if note.pop("sha256") != digest(path):
            return None
        return PreferenceTable(_mapped(path), Tally(**note), key)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # what a damaged note may lead to
        return None


def _mapped(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _note(path: Path) -> Path:
    return path.with_suffix(".json")


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write under; what is left there at the end is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}-{uuid4().hex}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()
