"""What `adpo prefer` is asked for, and its lists: training, validation and test sets."""

from __future__ import annotations

import dataclasses
import time
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adpo.models import embedded

from adpo.tasks import generated_tasks as tasks
from adpo.preferences.generated_lists import graded
from adpo.preferences.table import PreferenceTable, build
from adpo.preferences.reading import BadRow, BadRows, BadRowsError, Counts, read, validate
from adpo.runs.splits import set_aside
from adpo.runs.display import Display
from adpo.runs.settings.keys import sorted_out
from adpo.runs.settings.spellings import OF_PREFER

GENERATED = 2000  # lists, where no data is given
VALIDATION = 100  # lists of a validation set, at most, where nobody says how many


@dataclass(frozen=True)
class PreferSettings:
    """What the trainer's arguments do not say."""

    data: str | None = field(default=None, metadata={"help": "JSON lines, Parquet, or a name for `datasets`."})
    model: str = field(default="embedded", metadata={"help": "A name or folder transformers can load."})
    reference: str | None = field(default=None, metadata={"help": "Another model to anchor at (itself)."})
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a named data set."})
    data_split: str = field(default="train", metadata={"help": "Split of a named data set."})
    eval_data: str | None = field(default=None, metadata={"help": "Held-out lists; as data."})
    eval_split: str = field(default="test", metadata={"help": "Split of a named data set to hold out."})
    eval_lists: int = field(default=500, metadata={"help": "Held-out lists for before and after, at most."})
    dev_lists: int | None = field(
        default=None,
        metadata={"help": "Training lists taken for validation (a tenth, 100 at most; with eval_data none)."},
    )
    eval_every: int = field(default=50, metadata={"help": "Steps between evaluations on them; 0: never."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter instead of all weights."})
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name, low in {"eval_lists": 1, "dev_lists": 0, "eval_every": 0, "lora_r": 1}.items():
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}; got {getattr(self, name)}")
        if self.data is None and self.eval_data is not None:
            raise ValueError("eval_data means nothing without data (lists are generated): give data as well")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be at least 0 and below 1; got {self.lora_dropout}")

    @property
    def embedded(self) -> bool:
        return self.model == "embedded"


@dataclass(frozen=True)
class AskedToPrefer:
    """A run as it was asked for: its settings and the arguments of its trainer."""

    run: PreferSettings
    trainer: dict[str, Any]

    def described(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.run), **self.trainer}


def resolve(given: Mapping[str, Any]) -> AskedToPrefer:
    """Check names and types of what was given, in a file or on the command line."""
    from adpo.trainers.listwise import ListwiseConfig

    hints = typing.get_type_hints(ListwiseConfig)
    theirs = {f.name: hints.get(f.name, Any) for f in dataclasses.fields(ListwiseConfig) if f.init}
    run, trainer = sorted_out(given, typing.get_type_hints(PreferSettings), theirs, elsewhere=OF_PREFER)
    if trainer.get("remove_unused_columns"):
        raise ValueError("remove_unused_columns must be false: lists have columns that no model knows")
    return AskedToPrefer(PreferSettings(**run), trainer)


def check(run: PreferSettings, skip_bad: bool, display: Display) -> None:
    """Look through all the data, before any model is loaded; bad rows are named."""
    bad = BadRows()
    for name, split in ((run.data, run.data_split), (run.eval_data, run.eval_split)):
        if name is not None:
            started = time.monotonic()
            with display.stage(f"checking {name}", None):
                counts = validate(name, split, run.data_config, lambda rows: display.at(rows, {}))
            bad += counts.bad
            if counts.bad.count == 0 or skip_bad:
                _say(name, counts, time.monotonic() - started, display)
                if run.embedded:
                    _refuse_foreign(name, split, run.data_config)
    if bad.count and not skip_bad:
        raise BadRowsError(bad)


def _say(name: str, counts: Counts, seconds: float, display: Display) -> None:
    notes = f", {counts.bad.count} bad rows left out" if counts.bad.count else ""
    notes += f", {counts.tied} without preference" if counts.tied else ""
    display.say(
        f"{name}: {counts.rows:,} lists, {counts.completions:,} completions{notes} (checked "
        f"{counts.rows / max(seconds, 1e-9):,.0f} lists a second)"
    )


def _refuse_foreign(name: str, split: str, config: str | None) -> None:
    """The embedded model reads few characters."""
    known = set(embedded.CHARACTERS)
    for row in read(name, split, config):
        if isinstance(row, BadRow):
            continue
        texts = [row.prompt, *row.completions]
        foreign = next((c for text in texts if isinstance(text, str) for c in text if c not in known), None)
        if foreign is not None or not all(isinstance(text, str) for text in texts):
            what = f"the character {foreign!r}" if foreign is not None else "messages"
            raise ValueError(
                f"{row.place} has {what}, and the embedded model knows plain text of {embedded.CHARACTERS!r} "
                "alone: give a --model"
            )


@dataclass(frozen=True)
class Lists:
    """Three sets of lists without a prompt in common."""

    train: PreferenceTable
    dev: PreferenceTable | None  # the validation set: taken from them, chooses the best checkpoint
    test: PreferenceTable  # ranked before and after training only

    def __iter__(self) -> Iterator[PreferenceTable]:
        return (table for table in (self.train, self.dev, self.test) if table is not None)

    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "dev": len(self.dev or ()), "test": len(self.test)}


def prepare(
    run: PreferSettings, tokenizer: Any, config: Any, room: int | None, display: Display, seed: int
) -> Lists:
    """Tokenised lists; what is held out is settled by the text of the prompt, not by the seed."""

    def table(source: Any, split: str) -> PreferenceTable:
        return build(
            source,
            tokenizer,
            Path(config.cache) if config.cache else embedded.cache() / "preferences",
            max_length=room,
            skip_bad=config.skip_bad,
            split=split,
            config=run.data_config,
            chat=config.chat_template_kwargs or {},
            on_progress=lambda rows: display.at(rows, {}),
        )

    test: PreferenceTable | None = None
    with display.stage("tokenising", None):
        if run.data is None:
            train = table(graded(count=GENERATED, seed=seed), "train")
            test = table(graded(count=run.eval_lists, seed=seed, split="test"), "test")
        else:
            train = table(run.data, run.data_split)
            if run.eval_data is not None:
                test = table(run.eval_data, run.eval_split)
    _mention(train, display)
    train, test = _held_out(train, str(run.data)) if test is None else (_without(train, test, display), test)
    aside = run.dev_lists if run.dev_lists is not None or run.eval_data is None else 0
    count = set_aside(aside, len(train), VALIDATION, names=("dev_lists", "lists")) if run.eval_every else 0
    train, dev = _set_aside(train, count)
    test = test.select(range(min(run.eval_lists, len(test))))
    for name, part in (("train on", train), ("hold out", test)):
        if part.tied == len(part):
            raise ValueError(f"none of the {len(part)} lists to {name} has two different rewards")
    return Lists(train, dev, test)


def _held_out(table: PreferenceTable, name: str) -> tuple[PreferenceTable, PreferenceTable]:
    keys = table.prompt_keys
    places = {i for i, key in enumerate(keys) if tasks.held_out(key)}
    if not places or len(places) == len(keys):
        raise ValueError(f"{name} is too small to hold lists out of it: give --eval_data as well")
    return table.select([i for i in range(len(keys)) if i not in places]), table.select(sorted(places))


def _set_aside(table: PreferenceTable, count: int) -> tuple[PreferenceTable, PreferenceTable | None]:
    """The first so many lists, and all others that do not share a prompt with them."""
    keys = table.prompt_keys
    aside = set(keys[:count])
    kept = [i for i, key in enumerate(keys) if key not in aside]
    if not aside:
        return table, None
    if not kept:
        raise ValueError(f"the {count} lists to validate on share their prompts with all others: lower dev_lists")
    return table.select(kept), table.select(range(count))


def _without(train: PreferenceTable, test: PreferenceTable, display: Display) -> PreferenceTable:
    """No prompt may be trained on and tested on."""
    held_out = set(test.prompt_keys)
    kept = [i for i, key in enumerate(train.prompt_keys) if key not in held_out]
    if len(kept) < len(train):
        display.say(f"{len(train) - len(kept)} training lists have prompts of held-out ones: left out")
    if not kept:
        raise ValueError("every training list has the prompt of a held-out one: nothing is left to train on")
    return train.select(kept)


def _mention(table: PreferenceTable, display: Display) -> None:
    for count, what in (
        (table.truncated, "completions are longer than max_length and cut at their end"),
        (table.too_long, "lists have a prompt that leaves no room in max_length: left out"),
    ):
        if count:
            display.say(f"{count:,} {what}")
