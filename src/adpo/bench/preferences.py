"""Preference lists from a file of JSON lines: how fast they are checked, tokenized and read back, in what memory.

The file and the tokenizer are made on the spot: four completions of 50 to 150 words a list, drawn as unequally
often as those of a language, and a byte-level BPE trained on them. To read the lists back maps pages of the file
into memory, which count at the peak although the system takes them back when it needs them.
"""

from __future__ import annotations

import json
import random
import resource
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from adpo.preferences.table import build, validate

Result = TypeVar("Result")


class Language:
    """Words of which the n-th is used in proportion to 1/n."""

    def __init__(self, words: int = 20_000, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.words = ["".join(self.draw.choices(string.ascii_lowercase, k=2 + i % 9)) for i in range(words)]
        self.weights = list(accumulate(1 / n for n in range(1, words + 1)))

    def text(self) -> str:
        return " ".join(self.draw.choices(self.words, cum_weights=self.weights, k=self.draw.randint(50, 150)))

    def row(self) -> dict[str, Any]:
        completions = [self.text() for _ in range(4)]
        return {
            "prompt": self.text() + "\n",
            "completions": completions,
            "rewards": [self.draw.random() for _ in "1234"],
        }


def run(rows: int) -> None:
    """Measure each step on a file of so many lists, and print them."""
    console = Console(width=110)
    language = Language()
    tokenizer = _tokenizer(language.text() for _ in range(1_000))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lists.jsonl"
        with file.open("w") as lines:
            lines.writelines(json.dumps(language.row()) + "\n" for _ in range(rows))
        size, before = file.stat().st_size, _peak()
        console.print(
            f"{rows:,} lists of 4 completions, {size / 1e6:,.0f} MB of JSON lines; {before:,.0f} MiB before"
        )
        table = Table("step", "seconds", "lists/s", "MB/s", "peak memory")

        def measured(step: str, work: Callable[[], Result]) -> Result:
            started = time.perf_counter()
            with console.status(step):
                result = work()
            seconds = time.perf_counter() - started
            speed = f"{rows / seconds:,.0f}", f"{size / 1e6 / seconds:,.1f}"
            table.add_row(step, f"{seconds:.1f}", *speed, f"{_peak():,.0f} MiB")
            return result

        measured("check", lambda: validate(str(file)))
        measured("tokenize", lambda: build(str(file), tokenizer, Path(folder), max_length=512))
        found = measured("find it again", lambda: build(str(file), tokenizer, Path(folder), max_length=512))
        measured("read every list", lambda: sum(len(found[i]["completion_ids"]) for i in range(len(found))))
        console.print(table)


def _tokenizer(texts: Iterator[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


def _peak() -> float:
    """MiB that the process held at most until now."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
