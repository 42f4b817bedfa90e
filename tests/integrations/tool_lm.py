"""A tiny model that reads and writes any text, with Qwen3's chat template and its words for tool calls."""

import string
from importlib import resources

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = [
    "<|im_start|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


def tokenizer():
    pieces = ["<pad>", "<|im_end|>", *WORDS, *string.printable]
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>", padding_side="left"
    )
    found.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    found.chat_template = (resources.files("trl") / "chat_templates" / "qwen3.jinja").read_text()
    return found


def model(size):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=2048,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )
