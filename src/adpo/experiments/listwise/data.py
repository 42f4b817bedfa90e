"""Lists of responses with graded labels: from a file, or made up; and how the prompts are divided.

A file has one JSON object a line (``.gz`` or plain): ``instruction`` and ``responses``, each with ``text`` and a
number ``p_beats_baseline``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adpo.core.ties import merge_ties

LABEL = "p_beats_baseline"


class Listing(NamedTuple):
    """A prompt, its responses and their labels, higher = better; labels that are tied are equal."""

    instruction: str
    responses: tuple[str, ...]
    labels: tuple[float, ...]


class Split(NamedTuple):
    """Indices of prompts."""

    train: list[int]
    validation: list[int]
    test: list[int]


def load(path: Path) -> list[Listing]:
    """The lists of a file, in its order, less those whose labels are all tied: they prefer nothing."""
    found = [_listing(row, place) for place, row in _rows(path)]
    twice = len(found) - len({listing.instruction for listing in found})
    if twice:
        raise ValueError(f"{path}: {twice} instructions come more than once; expected one list for each")
    kept = [listing for listing in found if len(set(listing.labels)) > 1]
    if not kept:
        raise ValueError(f"{path} holds no list with two different labels")
    return kept


def split(listings: Sequence[Listing], validation: int, test: int) -> Split:
    """In the order of a hash of the prompt's text: first test, then validation, all others train.

    The order of the file does not matter, nor does any seed.
    """
    if validation + test >= len(listings):
        raise ValueError(
            f"{len(listings)} lists are too few for {test} test and {validation} validation prompts and training"
        )
    hashes = [hashlib.sha256(listing.instruction.encode()).hexdigest() for listing in listings]
    order = sorted(range(len(listings)), key=lambda i: hashes[i])
    return Split(order[test + validation :], order[test : test + validation], order[:test])


def synthetic(count: int = 60, size: int = 6, seed: int = 0) -> list[Listing]:
    """Made-up lists: a response is better the more of its letters are an x."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        texts, labels = [], []
        for _ in range(size - number % 2):
            share = draw.random()
            texts.append("".join("x" if draw.random() < share else "o" for _ in range(draw.randint(8, 16))))
            labels.append(round(share, 1))
        found.append(Listing(f"number {number}", tuple(texts), tuple(labels)))
    return found


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        raise ValueError(f"--data {path} is not a file; expected JSON lines of lists")
    read = gzip.open if path.suffix == ".gz" else open
    try:
        with read(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path}, line {number}", json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} cannot be read as JSON lines ({error})") from None


def _listing(row: Any, place: str) -> Listing:
    if not isinstance(row, dict) or not isinstance(row.get("instruction"), str):
        raise ValueError(f"{place}: expected an object with instruction, a text")
    responses = row.get("responses")
    if not isinstance(responses, list) or len(responses) < 2:
        raise ValueError(f"{place}: expected responses, a list of two or more")
    for response in responses:
        label = response.get(LABEL) if isinstance(response, dict) else None
        if not isinstance(label, int | float) or not math.isfinite(label) or label < 0:
            raise ValueError(f"{place}: every response needs {LABEL}, a number of at least 0; got {label!r}")
        if not isinstance(response.get("text"), str):
            raise ValueError(f"{place}: every response needs text")
    labels = torch.tensor([[float(response[LABEL]) for response in responses]], dtype=torch.float64)
    return Listing(
        row["instruction"],
        tuple(response["text"] for response in responses),
        tuple(merge_ties(labels, torch.ones_like(labels, dtype=torch.bool))[0].tolist()),
    )
