"""The text of a completion, and the final answer in it."""

from __future__ import annotations

from typing import Any

from adpo.tasks.problems import final_answer


def text_of(completion: Any) -> str:
    """The text of a completion, which TRL hands over as a string or as messages."""
    if isinstance(completion, str):
        return completion.strip()
    return str(completion[-1].get("content", "")).strip() if completion else ""


def answer_of(completion: Any) -> str:
    """The final answer where it is marked as one, else the whole text.

    >>> answer_of("12 + 30 is 42. #### 42"), answer_of(" 42 ")
    ('42', '42')
    """
    text = text_of(completion)
    return final_answer(text) or text
