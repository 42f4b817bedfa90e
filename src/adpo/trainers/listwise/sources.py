"""What a `ListwiseTrainer` is given, in the forms it may come in: models, tokenizers, data."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from adpo.models import embedded
from adpo.preferences.table import PreferenceTable, build
from adpo.trainers.listwise.config import ListwiseConfig

log = logging.getLogger("adpo")


def cache(args: ListwiseConfig) -> Path:
    """Where tokenised data and reference scores are kept."""
    return Path(args.cache) if args.cache else embedded.cache() / "preferences"


def load_model(name: str | Path) -> Any:
    """A causal language model by name or folder, in float32, never with code of its own."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"model {str(name)!r} cannot be loaded: {str(error).splitlines()[0]}") from None


def model_and_tokenizer(model: Any, tokenizer: Any, peft_config: Any) -> tuple[Any, Any]:
    """Both as objects, the model with its adapter where one is to be trained."""
    name = model if isinstance(model, str | Path) else model.config._name_or_path
    if isinstance(model, str | Path):
        model = load_model(model)
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(name)
    if peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config)
    return model, tokenizer


def room(args: ListwiseConfig, context: int | None) -> int | None:
    """The longest prompt and completion, by the arguments and by the model's context."""
    return min((limit for limit in (args.max_length, context) if limit is not None), default=None)


def table(data: Any, tokenizer: Any, args: ListwiseConfig, context: int | None) -> PreferenceTable | None:
    """Lists of token ids, whatever they come as."""
    if data is None or isinstance(data, PreferenceTable):
        return data
    most = room(args, context)
    made = build(
        data,
        tokenizer,
        cache(args),
        max_length=most,
        skip_bad=args.skip_bad,
        chat=args.chat_template_kwargs or {},
    )
    if made.truncated:
        log.warning(
            "%d completions lost their end: prompt and completion have room for %s tokens (max_length = %s, "
            "context of the model: %s)",
            *(made.truncated, most, args.max_length, context),
        )
    return made
