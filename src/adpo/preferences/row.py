"""One row of listwise preference data: what it may hold, and what is said of one that holds something else.

    {"prompt": "2+2=", "completions": ["4", "5", "22"], "rewards": [1.0, 0.2, 0.0]}     higher is better
    {"prompt": "2+2=", "completions": ["4", "5", "22"], "ranks": [1, 2, 2]}             1 is best; ties are allowed
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"}                                  a list of two

A prompt and its completions are text, or lists of messages ``{"role": ..., "content": ...}``. Chosen and rejected
messages may begin with the prompt instead of having it beside them. A field that is null counts as not there, and
fields that are not named here are not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from adpo.core.ties import all_tied

FIELDS = ("prompt", "completions", "rewards", "ranks", "chosen", "rejected")
Message = dict[str, Any]
"""``role``, ``content``, and what else the chat template reads."""
Conversation = str | list[Message]


@dataclass(frozen=True)
class Preferences:
    """A prompt and K >= 2 completions of the same kind, each with its reward: higher is better."""

    prompt: Conversation
    completions: list[Conversation]
    rewards: list[float]
    place: str = field(default="", compare=False)  # where the row was read

    @property
    def tied(self) -> bool:
        """Whether no completion is preferred to another."""
        return all_tied(self.rewards)


@dataclass(frozen=True)
class BadRow:
    """A row that is no list of preferences, and why; ``field`` is empty where it is no row at all.

    >>> print(BadRow("lists.jsonl, line 17", "rewards", "expected 4 numbers, one per completion; got 3"))
    lists.jsonl, line 17, rewards: expected 4 numbers, one per completion; got 3
    """

    place: str
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}{', ' if self.field else ''}{self.field}: {self.reason}"


class _Refused(Exception):  # noqa: N818 - how a check gives up, never seen outside
    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason


def check(row: Mapping[str, Any], place: str) -> Preferences | BadRow:
    """The preferences of a row, or the first thing that is wrong with it.

    >>> check({"prompt": "2+2=", "completions": ["4", "5"], "ranks": [1, 2]}, "row 1").rewards
    [-1.0, -2.0]
    """
    given = {name: row[name] for name in FIELDS if row.get(name) is not None}
    try:
        if "chosen" in given or "rejected" in given:
            prompt, completions = _pair(given)
            if completions[0] == completions[1]:
                _refuse("rejected", "another completion than chosen", "the same")
            return Preferences(prompt, completions, [1.0, 0.0], place)
        prompt = _prompt(given, sorted(map(str, row)))
        completions = _completions(given, prompt)
        rewards = _rewards(given, len(completions))
        if all(completion == completions[0] for completion in completions) and not all_tied(rewards):
            name = "rewards" if "rewards" in given else "ranks"
            _refuse(name, "equal ones, as all completions are the same", "different ones")
        return Preferences(prompt, completions, rewards, place)
    except _Refused as refused:
        return BadRow(place, refused.where, refused.reason)


def _refuse(where: str, expected: str, got: str) -> NoReturn:
    raise _Refused(where, f"expected {expected}; got {got}")


def _pair(given: Mapping[str, Any]) -> tuple[Conversation, list[Conversation]]:
    for name in ("chosen", "rejected"):
        if name not in given:
            _refuse(name, "chosen and rejected", "only the other one")
    if "completions" in given:
        _refuse("completions", "either completions or chosen and rejected", "both")
    chosen, rejected = (_conversation(given[name], name, name) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        _refuse("rejected", f"{_kind(chosen)}, as chosen is", _kind(rejected))
    if "prompt" not in given:
        return _split(chosen, rejected)
    prompt = _prompt(given, [])
    if isinstance(prompt, str) and not isinstance(chosen, str):  # a text beside conversations that begin with it
        if all(len(side) > 1 and side[-2]["content"] == prompt for side in (chosen, rejected)):  # type: ignore[index]
            return _split(chosen, rejected)
        _refuse("chosen", "text, as the prompt is, or messages that begin with it", "other messages")
    if isinstance(chosen, str) and not isinstance(prompt, str):
        _refuse("chosen", "messages, as the prompt is", "text")
    return prompt, [chosen, rejected]


def _split(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, list[Conversation]]:
    """The messages that both begin with are the prompt; the last message of the shorter one never is."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        _refuse(
            "prompt", "a prompt beside chosen and rejected that are text", "none (give it in a field of its own)"
        )
    most = min(len(chosen), len(rejected)) - 1
    common = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if common == 0:
        _refuse("prompt", "a prompt, or messages that chosen and rejected both begin with", "neither")
    return chosen[:common], [chosen[common:], rejected[common:]]


def _prompt(given: Mapping[str, Any], names: Sequence[str]) -> Conversation:
    if "prompt" not in given:
        _refuse("prompt", "text or messages", f"none; the row has {', '.join(names) or 'no fields'}"[:200])
    return _conversation(given["prompt"], "prompt", "the prompt")


def _completions(given: Mapping[str, Any], prompt: Conversation) -> list[Conversation]:
    if "completions" not in given:
        _refuse("completions", "a list of completions (or chosen and rejected)", "none")
    values = given["completions"]
    if not isinstance(values, list):
        _refuse("completions", "a list of completions", _shown(values))
    if len(values) < 2:
        _refuse("completions", "at least 2 completions", str(len(values)))
    found = []
    for number, value in enumerate(values, 1):
        completion = _conversation(value, "completions", f"completion {number}")
        if isinstance(completion, str) != isinstance(prompt, str):
            _refuse(
                "completions", f"{_kind(prompt)}, as the prompt is", f"{_kind(completion)} (completion {number})"
            )
        found.append(completion)
    return found


def _conversation(value: Any, where: str, what: str) -> Conversation:
    if isinstance(value, str):
        if not value:
            _refuse(where, "text", f"an empty string ({what})")
        return _text(value, where, what)
    if not isinstance(value, list):
        _refuse(where, "text or messages", f"{_shown(value)} ({what})")
    if not value:
        _refuse(where, "text or messages", f"an empty list ({what})")
    return [_message(message, where, f"message {number} of {what}") for number, message in enumerate(value, 1)]


def _message(value: Any, where: str, what: str) -> Message:
    if not isinstance(value, Mapping):
        _refuse(where, "messages with role and content", f"{_shown(value)} ({what})")
    for name in ("role", "content"):
        if value.get(name) is None:
            _refuse(where, "messages with role and content", f"no {name} ({what})")
        if not isinstance(value[name], str):
            _refuse(where, f"{name} as text", f"{_shown(value[name])} ({what})")
        _text(value[name], where, what)
    return {str(name): part for name, part in value.items() if part is not None}


def _text(value: str, where: str, what: str) -> str:
    """JSON can spell half a character, ``\\ud800``, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(where, "Unicode text", f"half of a surrogate pair, {value[error.start]!r} ({what})")
    return value


def _rewards(given: Mapping[str, Any], count: int) -> list[float]:
    if "rewards" in given and "ranks" in given:
        _refuse("rewards", "either rewards or ranks", "both")
    if "rewards" in given:
        return _numbers(given["rewards"], "rewards", count)
    if "ranks" not in given:
        _refuse("rewards", f"rewards or ranks, {count} numbers", "neither")
    ranks = _numbers(given["ranks"], "ranks", count)
    for rank in ranks:
        if rank < 1 or not rank.is_integer():
            _refuse("ranks", "whole numbers from 1, the best", f"{rank:g}")
    return [-rank for rank in ranks]


def _numbers(values: Any, where: str, count: int) -> list[float]:
    if not isinstance(values, list):
        _refuse(where, f"a list of {count} numbers, one per completion", _shown(values))
    if len(values) != count:
        _refuse(where, f"{count} numbers, one per completion", str(len(values)))
    for number, value in enumerate(values, 1):
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(where, "numbers", f"{_shown(value)} (number {number})")
        if not _finite(value):
            _refuse(where, "finite numbers", f"{value!r:.20} (number {number})")
    return [float(value) for value in values]


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of float64
        return False


def _kind(conversation: Conversation) -> str:
    return "text" if isinstance(conversation, str) else "messages"


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "null"
