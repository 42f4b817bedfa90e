"""Models that no trainer here can train: refused at the start, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from adpo.scoring.dropout import is_random

OTHER_ADAPTERS = {
    "ADALORA": "allots its ranks in a call after every step, which is not made",
    "XLORA": "makes a pass of its own before every pass",
}
"""Kinds of PEFT that need more of a trainer than gradients."""


def refuse_kind(trainer: str, model: Any) -> None:
    """A policy gives logits for the next token of a row, and what is trained of it is inside its layers."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{trainer} trains causal language models; {name} has an encoder, which would read the completions: "
            "take a model of AutoModelForCausalLM"
        )
    adapters = getattr(model, "peft_config", None)
    if adapters and not hasattr(model, "get_base_model"):
        raise ValueError(
            f"{trainer} does not train adapters of add_adapter: give it peft_config, or a model of "
            "peft.get_peft_model"
        )
    for why, config in _odd(adapters or {}):
        raise ValueError(f"{trainer} trains adapters inside of layers; {config} {why}: take a plain LoraConfig")
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{trainer} trains causal language models; {name} has no output layer over the vocabulary: load it by "
            "AutoModelForCausalLM"
        )


def refuse_tokenizer(trainer: str, model: Any, tokenizer: Any) -> None:
    """Tokens that a text may hold, or that rows are padded and ended with, must have an embedding.

    Added tokens need none: some tokenizers bring a few that their language model never sees.
    """
    rows, vocabulary = model.get_input_embeddings().weight.shape[0], tokenizer.get_vocab()
    added = {token for token, number in tokenizer.get_added_vocab().items() if number >= rows}
    needed = {tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token}
    beyond = [token for token, number in vocabulary.items() if number >= rows and token not in added - needed]
    if beyond:
        raise ValueError(
            f"{trainer} got a tokenizer with {len(beyond)} tokens beyond the {rows} embeddings of "
            f"{type(model).__name__}, the first {min(beyond, key=vocabulary.__getitem__)!r}: take the model's own "
            "tokenizer, or model.resize_token_embeddings(len(tokenizer))"
        )


def refuse_frozen(model: Any) -> None:
    """To be called before anything is sampled or scored for training."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"no parameter of this {type(model).__name__} is trained (requires_grad is False in all of them): "
            "give peft_config, load its adapter with is_trainable=True, or unfreeze weights"
        )


def refuse_noise(model: Any) -> None:
    """Of a model whose dropout has been switched off."""
    if is_random(model):
        raise ValueError(
            f"{type(model).__name__} draws random numbers in passes of training, which disable_dropout cannot "
            "switch off: u would not be zero where policy and anchor are equal; take another model, or "
            "disable_dropout: false"
        )


def _odd(adapters: Any) -> Iterator[tuple[str, str]]:
    """Adapters that act on a row before the model sees it, or need more than gradients: why, and their kind."""
    for config in adapters.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning:
            yield "puts virtual tokens before every row", type(config).__name__
        elif getattr(config, "alora_invocation_tokens", None):
            yield "with alora_invocation_tokens begins in the middle of a row", type(config).__name__
        elif kind in OTHER_ADAPTERS:
            yield OTHER_ADAPTERS[kind], type(config).__name__
