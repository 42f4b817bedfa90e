"""What of models and data cannot be trained is refused in one line, before a rollout or a pass is paid for."""

import logging

import pytest
import small_models
import test_packed_online as packed_online
import test_trl_online as online
import tiny_lm
import torch
from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer

from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer
from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

VOCABULARY = 2 + len(tiny_lm.CHARACTERS)
LISTS = {"prompt": "1+1=", "completions": ["2", "3"], "rewards": [1.0, 0.0]}


def online_trainer(kind, config):
    def made(folder, model=None, data=None, processing_class=None, **options):
        arguments = {**packed_online.ARGUMENTS, "per_device_train_batch_size": online.GROUP, **options}
        return kind(
            model=model or tiny_lm.model(),
            reward_funcs=online.reward,
            args=config(str(folder), **arguments),
            train_dataset=data or Dataset.from_list([{"prompt": "1+1="}]),
            processing_class=processing_class or tiny_lm.tokenizer(),
        )

    return made


def list_trainer(folder, model=None, data=None, processing_class=None):
    return ListwiseTrainer(
        model or tiny_lm.model(),
        ListwiseConfig(str(folder), use_cpu=True, bf16=False, report_to="none", cache=str(folder / "cache")),
        data or Dataset.from_list([LISTS]),
        processing_class=processing_class or tiny_lm.tokenizer(),
    )


ADPO, GRPO = online_trainer(ADPOTrainer, ADPOConfig), online_trainer(FastGRPOTrainer, FastGRPOConfig)
TRAINERS = {"ADPOTrainer": ADPO, "FastGRPOTrainer": GRPO, "ListwiseTrainer": list_trainer}
WITH_PICTURES = {
    "a column": lambda: Dataset.from_list([{**LISTS, "image": [0]}]),
    "a column of several": lambda: Dataset.from_list([{**LISTS, "images": [[0]]}]),
    "a stream": lambda: IterableDataset.from_generator(lambda: iter([{**LISTS, "image": [0]}])),
    "in the prompt": lambda: Dataset.from_list(
        [{**LISTS, "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text"}]}]}]
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("pictures", WITH_PICTURES)
def test_data_with_pictures(tmp_path, name, pictures):
    with pytest.raises(ValueError, match=f"{name} trains on text; this data set has") as complaint:
        TRAINERS[name](tmp_path, data=WITH_PICTURES[pictures]())
    assert "\n" not in str(complaint.value)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_processor_of_more_than_text(tmp_path, name):
    class Both(ProcessorMixin):
        def __init__(self):
            self.tokenizer = tiny_lm.tokenizer()

    with pytest.raises(ValueError, match=f"{name} trains on text; Both prepares more: give its tokenizer"):
        TRAINERS[name](tmp_path, processing_class=Both())


@pytest.mark.parametrize("name", TRAINERS)
def test_a_model_that_takes_pictures(tmp_path, name):
    model = tiny_lm.model()
    model.config.vision_config = {}
    with pytest.raises(ValueError, match=f"{name} trains on text; Qwen3ForCausalLM takes pictures or sound"):
        TRAINERS[name](tmp_path, model=model)


@pytest.mark.parametrize("name", ["ADPOTrainer", "ListwiseTrainer"])
def test_a_router_loss_that_a_model_asks_for(tmp_path, name):
    model = small_models.made("qwen3_moe", vocab_size=VOCABULARY, output_router_logits=True)
    with pytest.raises(ValueError, match=f"{name} adds no router loss, and this model asks for one"):
        TRAINERS[name](tmp_path, model=model)


def test_a_router_loss_that_trl_would_add_by_itself_is_named(tmp_path, caplog):
    model = small_models.made("qwen3_moe", vocab_size=VOCABULARY, router_aux_loss_coef=0.25)
    with caplog.at_level(logging.WARNING, "adpo"):
        ADPO(tmp_path, model=model)
    assert "ADPO adds no router loss: router_aux_loss_coef = 0.25 has no effect" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "adpo"):
        ADPO(tmp_path, model=model, router_aux_loss_coef=0.0)
    assert "router" not in caplog.text
    with pytest.raises(ValueError, match=r"router_aux_loss_coef = 0\.1 is refused: it shapes a loss that ADPO"):
        ADPO(tmp_path, model=model, router_aux_loss_coef=0.1)


class Sampled:
    _generate_single_turn = online.Fixed._generate_single_turn


@pytest.mark.parametrize("scoring", ["packed", "padded"])
def test_the_grpo_trainer_keeps_the_router_loss(tmp_path, scoring):
    def trained(kind, config, coefficient, **options):
        trainer = kind(
            model=small_models.made("qwen3_moe", vocab_size=VOCABULARY, router_aux_loss_coef=coefficient),
            reward_funcs=online.reward,
            args=config(
                str(tmp_path), **packed_online.ARGUMENTS, per_device_train_batch_size=online.GROUP, **options
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS[:1]]),
            processing_class=tiny_lm.tokenizer(),
        )
        trainer.train()
        return torch.cat([value.detach().flatten() for value in trainer.model.parameters()])

    found = trained(type("Kind", (Sampled, FastGRPOTrainer), {}), FastGRPOConfig, 5.0, scoring=scoring)
    expected = trained(type("Kind", (Sampled, GRPOTrainer), {}), GRPOConfig, 5.0)
    without = trained(type("Kind", (Sampled, GRPOTrainer), {}), GRPOConfig, 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (expected - without).abs().max() > 1e-4


def test_adpo_trains_experts_packed_as_padded(tmp_path):
    def trained(scoring):
        trainer = type("Kind", (Sampled, ADPOTrainer), {})(
            model=small_models.made("qwen3_moe", vocab_size=VOCABULARY),
            reward_funcs=online.reward,
            args=ADPOConfig(
                str(tmp_path), **packed_online.ARGUMENTS, per_device_train_batch_size=online.GROUP, scoring=scoring
            ),
            train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
            processing_class=tiny_lm.tokenizer(),
        )
        assert trainer.scorer.packs == (scoring == "packed")
        trainer.train()
        return torch.cat([value.detach().flatten() for value in trainer.model.parameters()])

    start = small_models.made("qwen3_moe", vocab_size=VOCABULARY)
    found, expected = trained("packed"), trained("padded")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not torch.equal(found, torch.cat([value.detach().flatten() for value in start.parameters()]))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LONG = "1+" * 40 + "1="  # 82 tokens where 64 are written


def test_prompts_within_a_stretched_context_are_members(tmp_path, monkeypatch):
    model = tiny_lm.model()
    model.config.rope_parameters = YARN
    made = type(model)(model.config)
    monkeypatch.setattr(tiny_lm, "model", lambda *_, **__: made)
    monkeypatch.setattr(online, "PROMPTS", [LONG])
    trainer = online.trained(tmp_path, 4, 1, steps=1)
    assert [entry["adpo/too_long"] for entry in trainer.state.log_history if "adpo/too_long" in entry] == [0.0]


def test_lists_are_cut_where_a_stretched_context_ends(tmp_path, caplog):
    model = tiny_lm.model()
    model.config.rope_parameters = YARN
    rows = [{**LISTS, "completions": ["2" * 100, "3" * 300]}]
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = list_trainer(tmp_path, model=model, data=Dataset.from_list(rows))
    assert [len(ids) for ids in trainer.train_dataset[0]["completion_ids"]] == [101, 256 - 4]
    assert "1 completions lost their end: prompt and completion have room for 256 tokens" in caplog.text


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def by_length():
    """A model whose positions depend on the longest row of a pass beyond 64 tokens."""
    model = tiny_lm.model()
    model.config.rope_parameters = DYNAMIC
    return type(model)(model.config)


def test_beyond_its_length_a_row_would_be_scored_by_its_neighbours():
    model, row = by_length(), torch.tensor([[2, 3, 4, 5]])

    def logits(longest):
        both = torch.full((2, longest), 2)
        both[0, :4] = row
        return model(both).logits[0, :4]

    with torch.no_grad():
        assert torch.allclose(logits(64), model(row).logits[0], atol=1e-6)
        assert not torch.allclose(logits(100), model(row).logits[0], atol=1e-5)


@pytest.mark.parametrize("name", ["ADPOTrainer", "FastGRPOTrainer"])
def test_completions_that_reach_that_length_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="beyond 64 tokens this model's positions depend on the longest row"):
        TRAINERS[name](tmp_path, model=by_length(), max_completion_length=64)


def test_rows_beyond_it_are_left_out(tmp_path, monkeypatch, caplog):
    made = by_length()
    monkeypatch.setattr(tiny_lm, "model", lambda *_, **__: made)
    monkeypatch.setattr(online, "PROMPTS", [LONG])
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = online.trained(tmp_path, 4, 1, steps=1)
    assert [entry["adpo/too_long"] for entry in trainer.state.log_history if "adpo/too_long" in entry] == [1.0]
    assert "(rope_type = dynamic): longer rows are left out" in caplog.text


def test_lists_are_cut_there(tmp_path, caplog):
    rows = [{**LISTS, "completions": ["2", "3" * 300]}]
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = list_trainer(tmp_path, model=by_length(), data=Dataset.from_list(rows))
    assert [len(ids) for ids in trainer.train_dataset[0]["completion_ids"]] == [2, 64 - 4]
    assert "longer rows are left out" in caplog.text


def test_with_the_losses_of_trl_they_end_the_run(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = GRPO(tmp_path, model=by_length(), data=Dataset.from_list([{"prompt": LONG}]))
    assert "longer rows end the run" in caplog.text
    with pytest.raises(ValueError, match=r"a row of \d+ was sampled: take shorter prompts"):
        trainer.train()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_in_float32_is_one_when_packed_too(tmp_path, weights, tied):
    def logp(scoring, cast):
        model = small_models.made("llama", vocab_size=VOCABULARY, tie_word_embeddings=tied).to(weights)
        with torch.no_grad():
            model.lm_head.weight.mul_(30)
        trainer = ADPO(tmp_path, model=model, bf16=True, scoring=scoring, cast_lm_head_to_fp32=cast)
        assert trainer.scorer.packs == (scoring == "packed")
        rows = {
            "prompt_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]),
            "prompt_mask": torch.ones(2, 3, dtype=torch.long),
            "completion_ids": torch.tensor([[4, 5, 6, 1], [7, 1, 0, 0]]),
            "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        }
        found = trainer.row_scorer.logp(trainer.model, rows)
        if scoring == "packed":
            total, known = trainer.row_scorer.weighted(trainer.model, rows, torch.tensor([1.0, 1.0]))
            torch.testing.assert_close(known.double(), found.detach(), rtol=0, atol=1e-6)
            assert total.requires_grad
        return found.detach()

    padded, packed, rounded = logp("padded", True), logp("packed", True), logp("packed", False)
    torch.testing.assert_close(packed, padded, rtol=0, atol=2e-2)  # bfloat16 layers, other kernels
    assert (rounded - padded).abs().max() > 2 * (packed - padded).abs().max()
