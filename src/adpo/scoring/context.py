"""How many tokens a model can attend over, by its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

STRETCHED = ("yarn", "linear", "dynamic")
"""Rotary scalings whose ``max_position_embeddings`` may be the length before scaling; that of llama3 and longrope
is the length after it, whatever their factor."""
BY_LENGTH = ("dynamic", "longrope")
"""Rotary scalings whose factors are chosen by the longest row of a pass."""
ALREADY_STRETCHED = "gemma3"
"""Models (by the start of ``model_type``) that count linear scaling in ``max_position_embeddings``."""


def context_length(config: Any) -> int | None:
    """The longest sequence, in tokens; None where the configuration names no limit.

    Rotary scaling may stretch it beyond ``max_position_embeddings``: by its factor, from the original length where
    that is given. Learned positions have no such scaling, and end where their table ends.

    >>> from types import SimpleNamespace as Config
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> context_length(Config(max_position_embeddings=40960, rope_parameters=yarn))
    131072
    >>> llama = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    >>> context_length(Config(max_position_embeddings=131072, rope_parameters=llama))
    131072
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    written: int | None = getattr(text, "max_position_embeddings", None)
    if not written or written < 0:
        return None
    return max([written, *_stretched(text, written)])


def depends_on_neighbours(config: Any) -> tuple[str, int] | None:
    """A rotary scaling that looks at the longest row of a pass, and the tokens beyond which it does.

    >>> from types import SimpleNamespace as Config
    >>> rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    >>> depends_on_neighbours(Config(max_position_embeddings=131072, rope_parameters=rope))
    ('longrope', 4096)
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    written: int = getattr(text, "max_position_embeddings", None) or 0
    for rope in _scalings(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        kind = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if kind in BY_LENGTH:
            return kind, (original if kind == "longrope" else None) or written
    return None


def longest_row(config: Any) -> int | None:
    """The longest sequence whose log-probabilities do not depend on what else is in its pass, in tokens.

    >>> from types import SimpleNamespace as Config
    >>> longest_row(Config(max_position_embeddings=4096, rope_parameters={"rope_type": "dynamic", "factor": 2.0}))
    4096
    """
    by_length = depends_on_neighbours(config)
    return context_length(config) if by_length is None else by_length[1]


def _stretched(text: Any, written: int) -> Iterator[int]:
    """What each kind of scaled layer makes of the length."""
    for rope in _scalings(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
        counted = kind == "linear" and str(getattr(text, "model_type", "")).startswith(ALREADY_STRETCHED)
        if kind in STRETCHED and factor and not counted:
            yield int(factor * (rope.get("original_max_position_embeddings") or written))


def _scalings(rope: Any) -> list[Mapping[str, Any]]:
    """One for all layers, or one for each type of them."""
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]
