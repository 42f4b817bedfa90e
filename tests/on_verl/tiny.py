"""A model and a tokenizer of letters, made here."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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


def save(folder):
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)
