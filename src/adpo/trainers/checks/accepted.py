"""What of models and data the trainers refuse at the start, before anything is loaded or sampled for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from transformers import ProcessorMixin

from adpo.scoring.context import depends_on_neighbours

log = logging.getLogger("adpo")
PICTURES = ("image", "images")


def refuse_pictures(trainer: str, data: Iterable[Any], processing_class: Any = None) -> None:
    """``data`` are data sets, by name or None among them."""
    for each in data:
        for one in each.values() if isinstance(each, Mapping) else [each]:
            row = _first(one)
            found = [f"a column {name!r}" for name in PICTURES if name in {*_columns(one), *row}]
            if found or _shows_pictures(row.get("prompt")):
                what = found[0] if found else "pictures in its prompts"
                raise ValueError(f"{trainer} trains on text; this data set has {what}: remove them")
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"{trainer} trains on text; {type(processing_class).__name__} prepares more: give its tokenizer as "
            "processing_class"
        )


def refuse_vision(trainer: str, model: Any, name: str = "") -> None:
    """Models that take more than text have positions and inputs of their own, which no test here holds."""
    config = model.config
    if getattr(config, "vision_config", None) is not None or config.get_text_config() is not config:
        name = name or type(model).__name__
        raise ValueError(
            f"{trainer} trains on text; {name} takes pictures or sound: load the language model in it "
            "(AutoModelForCausalLM on its text configuration)"
        )


def refuse_liger(args: Any) -> None:
    """On a CPU; imports would fail, or the first pass."""
    if args.use_liger_kernel and args.device.type in ("cpu", "mps"):
        raise ValueError(
            f"use_liger_kernel needs a GPU: its layers are triton's, which has none for {args.device.type}; leave "
            "it out"
        )


def refuse_router_loss(trainer: str, model: Any, asked: float | None = None) -> None:
    """The load-balancing loss is a product of means over a batch, which passes of another size would change."""
    text = model.config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if asked is None else asked
    if coefficient and getattr(text, "output_router_logits", False):
        raise ValueError(
            f"{trainer} adds no router loss, and this model asks for one (output_router_logits, "
            f"router_aux_loss_coef = {coefficient}): set output_router_logits to false in its configuration"
        )


def limit_rows(model: Any, completion: int = 0, *, instead: str = "are left out") -> None:
    """Where positions depend on the longest row of a pass, rows are no longer than they may be without that."""
    if (found := depends_on_neighbours(model.config)) is None:
        return
    if completion >= found[1]:
        raise ValueError(f"{_beyond(*found)}: lower max_completion_length, now {completion}")
    log.warning("%s: longer rows %s", _beyond(*found), instead)


def refuse_long_rows(model: Any, lengths: Iterable[int]) -> None:
    """Of a rollout, where no row can be left out."""
    found, longest = depends_on_neighbours(model.config), max(lengths, default=0)
    if found is not None and longest > found[1]:
        raise ValueError(
            f"{_beyond(*found)}; a row of {longest} was sampled: take shorter prompts, or sample less"
        )


def _beyond(kind: str, limit: int) -> str:
    return f"beyond {limit} tokens this model's positions depend on the longest row of a pass (rope_type = {kind})"


def _columns(data: Any) -> Iterable[str]:
    names = getattr(data, "column_names", None) or ()
    return {name for part in names.values() for name in part} if isinstance(names, Mapping) else names


def _first(data: Any) -> Mapping[str, Any]:
    """The first row; of a stream only where it does not name its columns, for a stream may be costly to begin."""
    if data is None or isinstance(data, str | Iterator) or not isinstance(data, Iterable):
        return {}
    if not isinstance(data, Sized) and _columns(data):
        return {}
    row = next(iter(data), None)
    return row if isinstance(row, Mapping) else {}


def _shows_pictures(prompt: Any) -> bool:
    """Whether messages have parts that are pictures."""
    messages = [m for m in prompt if isinstance(m, Mapping)] if isinstance(prompt, list) else []
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    return any(isinstance(part, Mapping) and part.get("type") == "image" for parts in contents for part in parts)
