"""Models that no trainer can train are refused in one line, before anything is sampled or scored."""

import pytest
import tiny_lm
from entries import ENTRIES, made, model_of
from peft import (
    AdaLoraConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import (
    AutoConfig,
    BartConfig,
    BartForConditionalGeneration,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

every_entry = pytest.mark.parametrize("entry", ENTRIES)
TASK, LAYERS = {"task_type": "CAUSAL_LM"}, {"target_modules": ["q_proj"]}
ADAPTERS = {
    "prompt tuning": (PromptTuningConfig(num_virtual_tokens=3, **TASK), "puts virtual tokens before every row"),
    "p-tuning": (PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **TASK), "virtual tokens"),
    "prefix tuning": (PrefixTuningConfig(num_virtual_tokens=3, **TASK), "puts virtual tokens before every row"),
    "activated": (LoraConfig(r=2, alora_invocation_tokens=[3, 4], **LAYERS, **TASK), "in the middle of a row"),
    "ranks": (AdaLoraConfig(init_r=4, target_r=2, total_step=9, **LAYERS, **TASK), "allots its ranks in a call"),
}


def with_an_encoder():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    config = BartConfig(vocab_size=16, max_position_embeddings=64, **sizes, **heads, **ids)
    return BartForConditionalGeneration(config)


def added():
    model = tiny_lm.model()
    model.add_adapter(LoraConfig(r=2, **LAYERS))
    return model


MODELS = {
    "an encoder": (with_an_encoder, "BartForConditionalGeneration has an encoder"),
    "classes": (lambda: Qwen3ForSequenceClassification(tiny_lm.model().config), "no output layer over"),
    "no head": (lambda: Qwen3Model(tiny_lm.model().config), "Qwen3Model has no output layer over the vocabulary"),
    "an adapter that was added": (added, "does not train adapters of add_adapter"),
}


def two_embeddings_short():
    model = tiny_lm.model()
    model.resize_token_embeddings(model.config.vocab_size - 2)
    return model


def complaint_of(entry, folder, **options):
    with pytest.raises(ValueError, match=r"^(ADPOTrainer|FastGRPOTrainer|ListwiseTrainer) ") as complaint:
        made(entry, folder, **options)
    assert "\n" not in str(complaint.value)
    return str(complaint.value)


@every_entry
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_outside_of_layers(tmp_path, entry, adapter):
    config, why = ADAPTERS[adapter]
    assert why in complaint_of(entry, tmp_path, adapter=config)


@every_entry
@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_no_policies(tmp_path, entry, kind):
    model, why = MODELS[kind]
    assert why in complaint_of(entry, tmp_path, model=model())


def an_adapter_for_inference():
    return get_peft_model(tiny_lm.model(), LoraConfig(r=2, inference_mode=True, **LAYERS, **TASK))


@every_entry
@pytest.mark.parametrize("model", [lambda: tiny_lm.model().requires_grad_(False), an_adapter_for_inference])
def test_nothing_to_train(tmp_path, entry, model):
    trainer = made(entry, tmp_path, model=model())
    trainer.score_reference = trainer._generate_single_turn = None  # neither is asked for
    with pytest.raises(ValueError, match=r"no parameter of this .* is trained"):
        trainer.train()


@pytest.mark.parametrize("entry", ["adpo", "lists"])
def test_noise_that_cannot_be_switched_off(tmp_path, entry):
    """Phi's experts are drawn in training."""
    model = model_of("phimoe", num_local_experts=4)
    with pytest.raises(ValueError, match="PhimoeForCausalLM draws random numbers in passes of training"):
        made(entry, tmp_path, model=model)
    made(entry, tmp_path, model=model, disable_dropout=False)


@every_entry
def test_tokens_without_an_embedding(tmp_path, entry):
    assert "a tokenizer with 2 tokens beyond the" in complaint_of(entry, tmp_path, model=two_embeddings_short())


@every_entry
def test_added_tokens_that_no_text_holds_need_none(tmp_path, entry):
    tokenizer = tiny_lm.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<picture>"]})
    made(entry, tmp_path, tokenizer=tokenizer)


@every_entry
@pytest.mark.parametrize("kind", ["fuyu", "gemma4"])
def test_models_of_more_than_text(tmp_path, entry, kind):
    """Also those that say nothing of vision in their configuration."""
    model = tiny_lm.model()
    model.config.get_text_config = lambda *_, **__: AutoConfig.for_model(kind).get_text_config()
    assert "takes pictures or sound: load the language model in it" in complaint_of(entry, tmp_path, model=model)


def test_a_router_loss_that_trl_cannot_compute(tmp_path):
    model = model_of("phimoe", num_local_experts=4)
    with pytest.raises(
        ValueError, match=r"TRL's router loss looks for num_experts.* set router_aux_loss_coef to 0"
    ):
        made("grpo", tmp_path, model=model)
    trainer = made("grpo", tmp_path, model=model_of("phimoe", num_local_experts=4), router_aux_loss_coef=0.0)
    assert trainer.train().global_step == 2
