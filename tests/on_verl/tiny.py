"""A model and a tokenizer of letters, made here."""

from functools import partial

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer():
    letters = [*SPECIAL, *(chr(code) for code in range(32, 127)), "\n"]
    made = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>", padding_side="left"
    )
    found.add_special_tokens({"additional_special_tokens": list(SPECIAL[3:])})
    found.chat_template = TEMPLATE
    return found


def model(seed=0):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer()),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=2,
            tie_word_embeddings=False,
        )
    )


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}


def model_of(name, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, "vocab_size": len(tokenizer()), **options})
    return AutoModelForCausalLM.from_config(config)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "rope_theta": 1e4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
MAMBA = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2}
KINDS = {
    "qwen3": model,
    "mistral": partial(model_of, "mistral", sliding_window=3),
    "qwen3_moe": partial(model_of, "qwen3_moe", **EXPERTS),
    "lfm2": partial(model_of, "lfm2", layer_types=["conv", "full_attention"]),
    "mamba2": partial(model_of, "mamba2", **MAMBA),
    "rwkv": partial(model_of, "rwkv", attention_hidden_size=32, context_length=256, rescale_every=1),
    "yarn": partial(model_of, "qwen3", head_dim=16, max_position_embeddings=16, rope_parameters=YARN),
    "dropout": partial(model_of, "qwen2", attention_dropout=0.5),
}
"""Models of a few thousand weights, by what they are for."""


def save(folder, made=None):
    tokenizer().save_pretrained(folder)
    (model() if made is None else made).save_pretrained(folder)
