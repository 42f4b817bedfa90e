"""The model a run starts from: a folder, a ``.gguf`` file, or a tiny one made on the spot."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from adpo.experiments.listwise.scoring import check_head
from adpo.models.gguf import load_gguf
from adpo.system import files
from adpo.system.devices import best_device


class ByteTokenizer:
    """One token per byte of the text; 256 ends it."""

    eos_token_id = 256
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [*text.encode(), *([self.eos_token_id] if add_special_tokens else [])]


def load(path: Path | None) -> tuple[Any, Any]:
    """Model, in float32 and on the device, and tokenizer; None is the tiny random model of the smoke preset."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if path is None:
        model, tokenizer = tiny(), ByteTokenizer()
    elif path.suffix == ".gguf":
        model, tokenizer = load_gguf(path)
    else:
        from adpo.runs.by_name import load_model

        model, tokenizer = load_model(path)
    model = model.to(best_device()).eval()
    check_head(model)
    return model, tokenizer


def tiny(seed: int = 0) -> Any:
    """An untrained model of bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=256,
            tie_word_embeddings=True,
        )
    )


def digest(path: Path | None) -> str:
    """What a job remembers of its model or data instead of a path: a hash of the file, or of a model's files."""
    if path is None:
        return "made up"
    found = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    if not found:
        raise ValueError(f"{path} is neither a file nor a folder with weights")
    contents = b"".join(bytes.fromhex(files.digest(each)) for each in found)
    return hashlib.sha256(contents).hexdigest()[:16]
