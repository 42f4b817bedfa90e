"""With disable_dropout, nothing is random in a training pass: u is zero where policy and anchor are the same."""

import pytest
import small_models
import test_listwise_trainer as listwise
import test_trl_features as features
import tiny_lm
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3ForCausalLM

from adpo.scoring.dropout import is_random, without_dropout


def attention_with_dropout():
    config = tiny_lm.model().config
    config.attention_dropout = 0.5
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def logp(model):
    ids = torch.arange(2, 14).view(2, 6)
    return model(input_ids=ids).logits


def test_attention_keeps_a_rate_of_its_own():
    model = attention_with_dropout().train()
    assert not torch.equal(logp(model), logp(model))
    without_dropout(model)
    assert torch.equal(logp(model), logp(model))
    model = get_peft_model(tiny_lm.model(), LoraConfig(lora_dropout=0.5, target_modules=["q_proj"])).train()
    torch.nn.init.normal_(next(v for n, v in model.named_parameters() if "lora_B" in n))
    assert not torch.equal(logp(model), logp(model))
    without_dropout(model)
    assert torch.equal(logp(model), logp(model))


@pytest.mark.parametrize("scoring", ["padded", "packed"])
def test_trainers_take_all_of_it_away(tmp_path, scoring):
    trainer = features.made(tmp_path, "adpo", model=attention_with_dropout(), scoring=scoring)
    trainer.model.train()
    assert torch.equal(logp(trainer.model), logp(trainer.model))
    rows = listwise.trained(tmp_path, listwise.ragged(), model=attention_with_dropout(), scoring=scoring)
    rows.model.train()
    assert torch.equal(logp(rows.model), logp(rows.model))
    first = next(log for log in rows.state.log_history if "adpo/anchor_kl" in log)
    assert first["adpo/anchor_kl"] == pytest.approx(0, abs=1e-10)


NOISY = {
    "layers left out": ("opt", {"layerdrop": 0.5, "ffn_dim": 32, "word_embed_proj_dim": 32}),
    "factors on experts": ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.3}),
}


@pytest.mark.parametrize("noise", NOISY)
def test_noise_that_is_no_dropout(noise):
    name, options = NOISY[noise]
    model = small_models.made(name, **options).train()
    assert not torch.equal(logp(model), logp(model))
    assert is_random(model)
    state = torch.get_rng_state()
    without_dropout(model)
    assert not is_random(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert torch.equal(logp(model), logp(model))
