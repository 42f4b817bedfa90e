"""Causal language models from a single ``.gguf`` file, as ordinary float32 models that can be trained.

transformers unpacks the quantised weights; the marks of quantisation it leaves on the model are taken off, for
they forbid training and saving. Needs the extra ``gguf``.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch


def load_gguf(path: str | Path) -> tuple[Any, Any]:
    """Model, in float32, and tokenizer; it pads on the right, with its end token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"model {str(path)!r} cannot be loaded: there is no such file")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model {str(path)!r} cannot be loaded: it needs gguf, pip install 'adpo[gguf]'")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="right")
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"model {str(path)!r} cannot be loaded: {reason}") from None
    _unmark(model)
    _settle_tokens(tokenizer, path)
    return model, tokenizer


def _unmark(model: Any) -> None:
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def _settle_tokens(tokenizer: Any, path: Path) -> None:
    """The end token that the file names, also for padding: some versions of transformers take another for it."""
    field = importlib.import_module("gguf").GGUFReader(path).fields.get("tokenizer.ggml.eos_token_id")
    if field is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(int(field.contents()))
    tokenizer.pad_token = tokenizer.eos_token
