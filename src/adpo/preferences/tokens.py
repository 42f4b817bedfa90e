"""Token ids of preference lists, the same as TRL's DPOTrainer makes of pairs.

Text: every completion ends with the end-of-sequence token. Messages: the chat template is applied to the prompt,
with the beginning of an answer, and to the prompt with each completion. Either way a completion begins where the
tokens of prompt and completion together leave those of the prompt alone, which may be before the prompt's last
token; it is one place for all completions of a list, so that they share a prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from adpo.preferences.row import BadRow, Conversation, Preferences

Ids = list[int]
CHARACTERS, ROWS = 1 << 20, 1024  # of a batch, whichever comes first


class TokenizedList(NamedTuple):
    """A prompt and its completions as token ids; none is empty but the prompt, where its only token merges."""

    prompt_ids: Ids
    completion_ids: list[Ids]
    rewards: list[float]
    prompt_key: str  # a hash of the prompt itself: its ids depend a little on what follows


Batch = list[TokenizedList | BadRow]


def batches(rows: Iterable[Preferences | BadRow], tokenizer: Any, chat: Mapping[str, Any]) -> Iterator[Batch]:
    """All rows as token ids, in their order, as many at a time as a fast tokenizer makes good use of."""
    waiting: list[Preferences | BadRow] = []
    characters = 0
    for row in rows:
        waiting.append(row)
        characters += _characters(row)
        if characters >= CHARACTERS or len(waiting) >= ROWS:
            yield tokenized(waiting, tokenizer, chat)
            waiting, characters = [], 0
    if waiting:
        yield tokenized(waiting, tokenizer, chat)


def tokenized(rows: Sequence[Preferences | BadRow], tokenizer: Any, chat: Mapping[str, Any]) -> Batch:
    """Token ids of rows; ``chat`` are arguments of the chat template.

    A row that the chat template refuses, or whose completion has no token of its own, is a bad row as well.
    """
    good = [row for row in rows if isinstance(row, Preferences)]
    of_text = iter(_of_text([row for row in good if isinstance(row.prompt, str)], tokenizer))
    of_messages = iter(_of_messages([row for row in good if not isinstance(row.prompt, str)], tokenizer, chat))
    return [
        row if isinstance(row, BadRow) else next(of_text if isinstance(row.prompt, str) else of_messages)
        for row in rows
    ]


def _characters(row: Preferences | BadRow) -> int:
    """As many as the tokenizer will be given: the prompt is there with every completion."""
    if isinstance(row, BadRow):
        return 0
    return (len(row.completions) + 1) * _length(row.prompt) + sum(map(_length, row.completions))


def _length(conversation: Conversation) -> int:
    if isinstance(conversation, str):
        return len(conversation)
    return sum(len(message["content"]) for message in conversation)


def identity(tokenizer: Any) -> str:
    """A hash of all that decides which ids a text gets."""
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        del state["padding"], state["truncation"]  # those of its latest call
    else:
        state = [type(tokenizer).__name__, tokenizer.get_vocab(), repr(getattr(tokenizer, "init_kwargs", None))]
    options = [getattr(tokenizer, name, None) for name in ("split_special_tokens", "chat_template", "eos_token")]
    parts = [state, options]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _of_text(rows: Sequence[Preferences], tokenizer: Any) -> Batch:
    if not rows:
        return []
    if not tokenizer.eos_token:
        raise ValueError("the tokenizer has no eos_token, which completions that are text need to end with")
    return _grouped(rows, _ids([_texts(row, tokenizer.eos_token) for row in rows], tokenizer))


def _texts(row: Preferences, end: str) -> list[str]:
    """The prompt alone, then with each completion."""
    prompt, completions = str(row.prompt), map(str, row.completions)
    return [prompt, *(prompt + text + ("" if text.endswith(end) else end) for text in completions)]


def _of_messages(rows: Sequence[Preferences], tokenizer: Any, chat: Mapping[str, Any]) -> Batch:
    if not rows:
        return []
    fast = getattr(tokenizer, "is_fast", False)  # one that is not may render other text than it tokenizes
    if fast and not tokenizer.chat_template and not chat.get("chat_template"):
        raise ValueError("the tokenizer has no chat template, which prompts that are messages need")
    rendered = [_templated(row, tokenizer, {**chat, "tokenize": not fast, "return_dict": False}) for row in rows]
    accepted = [texts for texts in rendered if not isinstance(texts, BadRow)]
    kept = [row for row, texts in zip(rows, rendered, strict=True) if not isinstance(texts, BadRow)]
    found = iter(_grouped(kept, _ids(accepted, tokenizer, add_special_tokens=False) if fast else accepted))
    return [texts if isinstance(texts, BadRow) else next(found) for texts in rendered]


def _templated(row: Preferences, tokenizer: Any, options: Mapping[str, Any]) -> list[Any] | BadRow:
    """The chat template's text, or ids, of the prompt alone, then with each completion."""
    prompt: Any = row.prompt
    found = []
    for number, end in enumerate([[], *row.completions]):
        try:
            found.append(
                tokenizer.apply_chat_template(prompt + end, **{**options, "add_generation_prompt": number == 0})
            )
        except jinja2.TemplateError as error:
            where, what = ("completions", f"completion {number}") if number else ("prompt", "it")
            reason = " ".join(str(error).split())[:200]
            return BadRow(row.place, where, f"the chat template refuses {what}: {reason}")
    return found


def _ids(rows: Sequence[Sequence[str]], tokenizer: Any, **options: Any) -> list[list[Ids]]:
    """Ids of all texts of all rows, in one call."""
    texts = [text for row in rows for text in row]
    if not texts:
        return []
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False, **options}
    ids = iter(tokenizer(texts, **options)["input_ids"])
    return [[next(ids) for _ in row] for row in rows]


def _grouped(rows: Sequence[Preferences], ids: Sequence[list[Ids]]) -> Batch:
    return [_cut_at_prompt(row, *alone_and_whole) for row, alone_and_whole in zip(rows, ids, strict=True)]


def _cut_at_prompt(row: Preferences, prompt: Ids, *whole: Ids) -> TokenizedList | BadRow:
    length = min(_common(prompt, ids) for ids in whole)
    completions = [ids[length:] for ids in whole]
    for number, ids in enumerate(completions, 1):
        if not ids:
            return BadRow(row.place, "completions", f"expected tokens; got none from completion {number}")
    key = hashlib.sha256(json.dumps(row.prompt, sort_keys=True).encode()).hexdigest()
    return TokenizedList(prompt[:length], completions, row.rewards, key[:16])


def _common(ids: Ids, others: Ids) -> int:
    """How many ids both begin with."""
    if ids == others[: len(ids)]:
        return len(ids)
    return next(
        (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others))
    )
