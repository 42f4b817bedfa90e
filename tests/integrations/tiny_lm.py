"""A causal language model of the size of a thumbnail, made on the spot: characters as tokens."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+=- "


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def model(seed=0, hidden_size=16, layers=1):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=2 + len(CHARACTERS),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden_size // 2,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)
