"""The rows of a run: training, validation and test sets without a problem in common."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adpo.tasks import problems as data

from adpo.tasks import generated_tasks as tasks
from adpo.tasks.generated_tasks import Problem
from adpo.runs.settings.train_settings import RunSettings

log = logging.getLogger("adpo")
Row = dict[str, Any]
"""``prompt``, and what reward functions are given beside it."""


@dataclass(frozen=True)
class Data:
    """Three sets of rows without a problem in common."""

    train: list[Row]
    dev: list[Row]  # the validation set: taken from the training problems, chooses the best checkpoint
    test: list[Row]  # seen before and after training only


def prepare(run: RunSettings, tokenizer: Any, seed: int) -> Data:
    """The run's rows, with prompts in the form its model understands."""
    if run.reward is not None and run.data is not None:
        train, test = _own_rows(run)
    else:
        found = _problems(run, seed)
        instruction = None if run.embedded else run.instruction
        train, test = ([row_of(problem, tokenizer, instruction) for problem in problems] for problems in found)
    random.Random(0).shuffle(test)  # files are often in some order; the seed of a run is not to choose its test
    train = list({_key(row): row for row in train}.values())  # a problem that is there twice counts once
    random.Random(seed).shuffle(train)
    count = 0
    if run.eval_every:
        default = None if run.eval_data is None else 0
        wanted = run.dev_problems if run.dev_problems is not None else default
        count = set_aside(wanted, len(train), VALIDATION, run.train_problems, ("dev_problems", "problems"))
    return Data(train[count:][: run.train_problems], train[:count], test[: run.eval_problems])


VALIDATION = 200
"""Problems of a validation set, at most, where nobody says how many."""
SHARE = 10
"""One in so many goes to the validation set, where nobody says how many."""


def set_aside(
    wanted: int | None, there: int, most: int, to_train: int | None = None, names: tuple[str, str] = ("", "")
) -> int:
    """Size of the validation set: as ``wanted``; else a tenth, or what training leaves over."""
    if wanted is None:
        left_over = 0 if to_train is None else there - to_train
        return min(most, max(there // SHARE, left_over))
    if wanted and wanted >= there:
        raise ValueError(
            f"{names[0]} = {wanted} leaves nothing of {there} {names[1]} to train on: lower it (0: no validation)"
        )
    return wanted


def _problems(run: RunSettings, seed: int) -> tuple[list[Problem], list[Problem]]:
    if run.data is None:
        wanted = (run.train_problems or 8000) + (VALIDATION if run.dev_problems is None else run.dev_problems)
        return _generated(run, wanted, "train", seed), _generated(run, run.eval_problems, "test", seed)
    train = _load(run.data, run.data_split, run)
    if run.eval_data is not None or not is_file(run.data):
        test = _load(run.eval_data or run.data, run.eval_split, run)
        if is_file(run.data):
            data.refuse_overlap(train, test)
        return _without(train, test), test
    held_out = [problem for problem in train if tasks.split_of(problem) == "test"]
    if not held_out:
        raise ValueError(f"{run.data} is too small to hold problems out of it: give --eval_data as well")
    return [problem for problem in train if tasks.split_of(problem) == "train"], held_out


def _without(train: list[Problem], test: list[Problem]) -> list[Problem]:
    """Published data sets do have a few questions in both of their splits."""
    held_out = {problem.question for problem in test}
    kept = [problem for problem in train if problem.question not in held_out]
    if len(kept) < len(train):
        log.warning("%d training problems are test problems as well: left out", len(train) - len(kept))
    return kept


def _generated(run: RunSettings, count: int, split: tasks.Split, seed: int) -> list[Problem]:
    return tasks.up_to(run.task, count, level=run.level, seed=seed, split=split)


def _load(name: str, split: str, run: RunSettings) -> list[Problem]:
    if is_file(name):
        return data.load(name, run.levels)
    return data.of_rows(named(name, run.data_config, split), f"{name}, {split}", run.levels)


def is_file(name: str) -> bool:
    """Whether a name is meant as a file of JSON lines, not as a data set."""
    return Path(name).is_file() or name.endswith((".jsonl", ".json"))


def check_files(run: RunSettings) -> None:
    """Complain about a file that is not there, before a model is loaded for it."""
    for name in (run.data, run.eval_data):
        if name is not None and is_file(name) and not Path(name).is_file():
            raise ValueError(f"{name} is not a file; expected JSON lines of problems")


def named(name: str, config: str | None, split: str) -> Any:
    """A data set by the name `datasets` knows it by; a folder will do."""
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # whatever it meets: files, network, names
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"data set {name!r} cannot be loaded: {reason}") from None


def row_of(problem: Problem, tokenizer: Any, instruction: str | None) -> Row:
    """A question in words, with what is to be done; bare, as for a model of characters, without an instruction."""
    columns = {
        "task": problem.task,
        "level": problem.level,
        "answer": problem.answer,
        "question": problem.question,
    }
    if instruction is None:
        return {"prompt": problem.prompt, **columns}
    text = f"{problem.question}\n{instruction}".strip()
    if getattr(tokenizer, "chat_template", None):
        return {"prompt": [{"role": "user", "content": text}], **columns}
    return {"prompt": f"{text}\n", **columns}


def _own_rows(run: RunSettings) -> tuple[list[Row], list[Row]]:
    """Rows for a reward function of the user's: ``prompt`` and whatever the function reads."""
    assert run.data is not None
    train = list(_read(run.data, run.data_split, run))
    if run.eval_data is not None or not is_file(run.data):
        test = list(_read(run.eval_data or run.data, run.eval_split, run))
        both = {_key(row) for row in train} & {_key(row) for row in test}
        if both:
            raise ValueError(f"{len(both)} prompts are in both training and test data, such as: {min(both)[:80]}")
        return train, test
    test = [row for row in train if tasks.held_out(_key(row))]
    if not test:
        raise ValueError(f"{run.data} is too small to hold rows out of it: give --eval_data as well")
    return [row for row in train if not tasks.held_out(_key(row))], test


def _read(name: str, split: str, run: RunSettings) -> list[Row]:
    rows = data.read_rows(Path(name)) if is_file(name) else enumerate(named(name, run.data_config, split), 1)
    found: list[Row] = []
    kinds: dict[str, str] = {}
    for number, row in rows:
        place, prompt = f"{name}, line {number}", row.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise ValueError(f"{place}: expected a prompt, text or messages; got {prompt!r:.60}")
        for column, value in row.items():
            kind = _kind(value)
            if kind is not None and kinds.setdefault(column, kind) != kind:
                raise ValueError(f"{place}: expected {column} to be {kinds[column]}, as before; got {value!r:.60}")
        found.append(dict(row))
    if not found:
        raise ValueError(f"{name} holds no rows")
    columns = dict.fromkeys(column for row in found for column in row)
    return [{column: row.get(column) for column in columns} for row in found]  # what a row does not say is None


def _kind(value: Any) -> str | None:
    """What all values of a column have to be; None of a missing one, and of what only a library knows."""
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return kinds.get(type(value))


def _key(row: Row) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def that_fit(
    rows: Sequence[Row],
    tokenizer: Any,
    context: int | None,
    completion: int,
    chat: Mapping[str, Any],
    whose: str = "model",
) -> list[Row]:
    """Without rows whose prompt leaves no room for a completion."""
    if context is None or not rows:
        return list(rows)
    kept = [row for row in rows if prompt_tokens(row["prompt"], tokenizer, chat) + completion <= context]
    if len(kept) < len(rows):
        log.warning(
            "%d of %d prompts leave no room for %d tokens in a context of %d: left out",
            len(rows) - len(kept),
            len(rows),
            completion,
            context,
        )
    if not kept:
        raise ValueError(f"no prompt leaves room for {completion} tokens in the {whose}'s context of {context}")
    return kept


def prompt_tokens(prompt: Any, tokenizer: Any, chat: Mapping[str, Any]) -> int:
    """Length of a prompt; ``chat`` are arguments of the chat template."""
    return len(prompt_ids(prompt, tokenizer, chat))


def prompt_ids(prompt: Any, tokenizer: Any, chat: Mapping[str, Any] | None = None) -> list[int]:
    """Tokens of a prompt, text or messages."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, **(chat or {})}
    return list(tokenizer.apply_chat_template(prompt, **options))
