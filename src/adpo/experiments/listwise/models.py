"""The model a run starts from: a folder, a ``.gguf`` file, or a tiny one made on the spot."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from adpo.experiments.listwise.scoring import check_head
from adpo.models.gguf import load_gguf
from adpo.system.devices import best_device


class ByteTokenizer:
    """One token per byte of the text; 256 ends it."""

    eos_token_id = 256
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [*text.encode(), *([self.eos_token_id] if add_special_tokens else [])]


def load(path: Path | None) -> tuple[Any, Any]:
    """Model, in float32 and on the device, and tokenizer; None is the tiny random model of the smoke preset."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if path is None:
        model, tokenizer = tiny(), ByteTokenizer()
    elif path.suffix == ".gguf":
        model, tokenizer = load_gguf(path)
    else:
        model, tokenizer = _folder(path)
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


def _folder(path: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not path.is_dir():
        raise ValueError(f"--model {path} is neither a folder nor a .gguf file")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--model {path} cannot be loaded: {reason}") from None


def digest(path: Path | None) -> str:
    """What a job remembers of its model or data instead of a path: a hash of the file, or of a model's files."""
    if path is None:
        return "made up"
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    if not files:
        raise ValueError(f"{path} is neither a file nor a folder with weights")
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()[:16]
