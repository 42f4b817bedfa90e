"""Listwise preference data from files and data sets, read one row at a time.

    for row in read("lists.jsonl"):          # also .json, .jsonl.gz, .parquet, or a name `datasets` knows
        print(row)                           # Preferences, or BadRow: where it is and what is wrong with it

A bad row never ends the reading. What makes a whole file unreadable is a ValueError of one line.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adpo.preferences.row import FIELDS, BadRow, Conversation, Message, Preferences, check

__all__ = [
    "BadRow",
    "BadRows",
    "BadRowsError",
    "Conversation",
    "Counts",
    "Message",
    "Preferences",
    "Source",
    "check",
    "digest",
    "opened",
    "read",
    "validate",
]

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file, the name of a data set, or rows at hand."""
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
SHOWN = 1000  # bad rows that are kept to be shown; of the others only the number


@dataclass(frozen=True)
class Source:
    """Rows that were found, under the name that places of bad rows begin with."""

    name: str
    content: Path | Iterable[Mapping[str, Any]]

    def rows(self) -> Iterator[Preferences | BadRow]:
        """Every row, checked; none at all is an error."""
        count = 0
        for place, row in self._placed():
            count += 1
            yield row if isinstance(row, BadRow) else check(row, place)
        if count == 0:
            raise ValueError(f"{self.name or 'the data'} holds no rows")

    def digest(self) -> str:
        """What the rows are known by: another one whenever they change."""
        if isinstance(self.content, Path):
            return digest(self.content)
        known = getattr(self.content, "_fingerprint", None)  # a datasets.Dataset
        if known is not None:
            return str(known)
        if iter(self.content) is self.content:
            raise ValueError("expected rows that can be read more than once, such as a list; got an iterator")
        total = hashlib.sha256()
        for row in self.content:
            total.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return total.hexdigest()

    def _placed(self) -> Iterator[tuple[str, Mapping[str, Any] | BadRow]]:
        if isinstance(self.content, Path):
            return _parquet(self.content) if self.content.suffix == ".parquet" else _json_lines(self.content)
        start = f"{self.name}, row" if self.name else "row"
        return _objects((f"{start} {number}", row) for number, row in enumerate(self.content, 1))


def opened(source: Rows, split: str = "train", config: str | None = None) -> Source:
    """Find the rows; ``split`` and ``config`` are those of a data set that is given by its name."""
    if not isinstance(source, str | Path):
        return Source("", source)
    path = Path(source)
    if path.name.endswith(SUFFIXES):
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is not there"
            raise ValueError(f"{source} {what}; expected a file of preferences")
        return Source(str(source), path)
    if path.is_file():
        raise ValueError(f"{source} is of no kind that can be read; expected one of {', '.join(SUFFIXES)}")
    return Source(f"{source}, {split}", _named(str(source), split, config))


def read(source: Rows, split: str = "train", config: str | None = None) -> Iterator[Preferences | BadRow]:
    """The rows of a file, of a data set, or at hand, in their order."""
    return opened(source, split, config).rows()


def digest(source: str | Path) -> str:
    """SHA-256 of the bytes of a file."""
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass
class BadRows:
    """How many rows are bad, and the first of them."""

    first: list[BadRow] = field(default_factory=list)
    count: int = 0

    def add(self, row: BadRow) -> None:
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(row)

    def __add__(self, other: BadRows) -> BadRows:
        return BadRows((self.first + other.first)[:SHOWN], self.count + other.count)

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return "\n".join([*map(str, self.first), *([f"... and {more} more"] if more else [])])


class BadRowsError(ValueError):
    """One line for every bad row, then how to go on."""

    def __init__(self, bad: BadRows) -> None:
        rows = "1 row is bad" if bad.count == 1 else f"{bad.count} rows are bad"
        super().__init__(f"{bad}\n{rows}: correct them, or leave them out with --skip-bad")
        self.bad = bad


@dataclass
class Counts:
    """What a check of all rows found: good ones, their completions, those without a preference, and bad ones."""

    rows: int = 0
    completions: int = 0
    tied: int = 0
    bad: BadRows = field(default_factory=BadRows)

    def add(self, row: Preferences | BadRow) -> None:
        if isinstance(row, BadRow):
            self.bad.add(row)
        else:
            self.rows += 1
            self.completions += len(row.completions)
            self.tied += row.tied


def validate(
    source: Rows,
    split: str = "train",
    config: str | None = None,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Counts:
    """Check every row, without a tokenizer; bad ones are counted, not raised.

    ``on_progress`` hears the number of rows read, now and then.
    """
    counts = Counts()
    for number, row in enumerate(read(source, split, config), 1):
        counts.add(row)
        if number % 1000 == 0:
            on_progress(number)
    return counts


def _objects(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any] | BadRow]]:
    for place, row in rows:
        if isinstance(row, Mapping | BadRow):
            yield place, row
        else:
            yield place, BadRow(place, "", f"expected an object with fields; got {type(row).__name__} {row!r:.60}")


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | BadRow]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                if text:
                    place = f"{path}, line {number}"
                    yield from _objects([(place, _parsed(text, place))])
    except (EOFError, zlib.error):
        raise ValueError(f"{path} is cut off or damaged: nothing can be read after line {number}") from None
    except gzip.BadGzipFile:
        where = f"is damaged after line {number}" if number else "is not a gzip file"
        raise ValueError(f"{path} {where}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _parsed(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRow(place, "", f"expected UTF-8 text; got byte 0x{line[error.start]:02x} at {error.start + 1}")
    except json.JSONDecodeError as error:
        return BadRow(place, "", f"expected a JSON object on one line; at character {error.pos + 1}: {error.msg}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        return BadRow(place, "", f"expected a JSON object on one line; {str(error)[:80]}")


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any] | BadRow]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            columns = _wanted(file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=128, columns=columns, use_threads=False):
                for row in _unpacked(batch):
                    number += 1
                    place = f"{path}, row {number}"
                    yield (
                        place,
                        row if row is not None else BadRow(place, "", "expected UTF-8 text; got other bytes"),
                    )
    except (pyarrow.ArrowException, OSError) as error:
        what = f"is damaged after row {number}" if number else "is not a Parquet file, or is cut off or damaged"
        raise ValueError(f"{path} {what}: {_one_line(error)}") from None


def _unpacked(batch: Any) -> list[Mapping[str, Any] | None]:
    """The rows of a batch of Arrow; None for one whose text is not UTF-8, which Arrow does not check."""
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for i in range(batch.num_rows) for row in _unpacked(batch.slice(i, 1))]


def _wanted(columns: Sequence[str], name: str) -> list[str]:
    there = [column for column in columns if column in FIELDS]
    lists = {"prompt", "completions"} <= set(there) and ("rewards" in there or "ranks" in there)
    if not lists and not {"chosen", "rejected"} <= set(there):
        wanted = "prompt, completions and rewards or ranks; or prompt, chosen and rejected"
        raise ValueError(f"{name} lacks columns: expected {wanted}; got {', '.join(columns)[:200] or 'none'}")
    return there


def _named(name: str, split: str, config: str | None) -> Iterable[Mapping[str, Any]]:
    """A data set by the name `datasets` knows it by; a folder will do. It lies on disk, not in memory."""
    import datasets

    try:
        found = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # whatever it meets: files, network, names
        raise ValueError(f"data set {name!r} cannot be loaded: {_one_line(error)}") from None
    rows: Iterable[Mapping[str, Any]] = found.select_columns(_wanted(found.column_names, f"{name}, {split},"))
    return rows


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
