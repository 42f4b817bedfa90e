"""Policies of a published shape with random weights, and a tokenizer that lets a trainer run."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, PAD = 1, 0


def policy(name: str, device: torch.device, *, exact: bool = False, seed: int = 1) -> Any:
    """Qwen3-1.7B's shape, SmolLM2-135M's, or one for a CPU; ``exact``: the same weights in float32."""
    torch.manual_seed(seed)
    special = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None, "tie_word_embeddings": True}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        if name == "1.7B":
            config: Any = Qwen3Config(
                hidden_size=2048,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=6144,
                vocab_size=151936,
                max_position_embeddings=8192,
                **special,
            )
        elif name == "0.13B":
            config = LlamaConfig(
                hidden_size=576,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                intermediate_size=1536,
                vocab_size=49152,
                max_position_embeddings=8192,
                **special,
            )
        else:
            config = Qwen3Config(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                intermediate_size=128,
                vocab_size=1000,
                max_position_embeddings=512,
                **special,
            )
        kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen3ForCausalLM
        made = kind(config).to(dtype)
    return made.float() if exact else made


def tokenizer() -> Any:
    """Knows two words: pad and end. Prompts and completions come as token ids."""
    words = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": END}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
