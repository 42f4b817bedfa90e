"""Online training on packed rows is training on padded ones: ADPO's, and TRL's own losses."""

import logging

import pytest
import test_trl_online as online
import tiny_lm
import torch
from datasets import Dataset
from peft import LoraConfig
from small_memory import Small
from trl import GRPOConfig, GRPOTrainer

from adpo.scoring import scorer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

ARGUMENTS = {
    "max_completion_length": online.LENGTH,
    "lr_scheduler_type": "constant",
    "learning_rate": 0.05,
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "shuffle_dataset": False,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "num_generations": online.GROUP,
    "max_steps": 3,
}


def logged(trainer, name):
    return torch.tensor([entry[name] for entry in trainer.state.log_history if name in entry], dtype=torch.float64)


def assert_alike(found, expected, atol=1e-6):
    for mine, other in zip(online.weights(found), online.weights(expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=atol)
    moved = zip(online.weights(found), tiny_lm.model().parameters(), strict=False)
    assert any(not torch.equal(mine, start) for mine, start in moved)


OPTIONS = {
    "first steps alone": {"num_iterations": 1},
    "several steps on a rollout": {"num_iterations": 2},
    "a rollout of two steps": {"num_iterations": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "mean of tokens, likelihood": {"logp_reduction": "mean", "nll_weight": 0.1},
    "another temperature of sampling": {"temperature": 0.7},
    "ema": {"anchor": "ema", "anchor_decay": 0.5},
    "reverse": {"divergence": "reverse_kl"},
    "rankings": {"target": "plackett_luce"},
    "automatic temperature": {"tau_schedule": "auto"},
    "confidence by tokens": {"tau_schedule": "hybrid", "tau_confidence": "tokens"},
    "prompts apart": {"share_prompts": False},
    "activations made again": {"gradient_checkpointing": True},
}


def test_the_size_of_a_pass_changes_with_a_new_rollout_alone(tmp_path, monkeypatch):
    """Passes of another size round otherwise, and a log-ratio would be that of the rounding."""
    asked = []
    settle = scorer.TokenBudget.settle
    monkeypatch.setattr(scorer.TokenBudget, "settle", lambda budget: asked.append(budget) or settle(budget))
    trainer = online.trained(tmp_path, 4, 4, scoring="packed", num_iterations=2)
    assert (trainer.state.global_step, len(asked)) == (3, 2)


@pytest.mark.parametrize("tokens", [12, 40, "auto"])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_rows_train_as_padded_ones(tmp_path, name, tokens):
    options = {"num_iterations": 2, **OPTIONS[name]}
    plain = online.trained(tmp_path / "a", 4, 4, **options)
    packs = online.trained(tmp_path / "b", 4, 4, scoring="packed", tokens_per_pass=tokens, **options)
    assert packs.scorer.packs
    assert not plain.scorer.packs
    assert_alike(packs, plain)
    for key in ("loss", "adpo/loss_of_groups", "adpo/best_logp", "adpo/tau"):
        torch.testing.assert_close(logged(packs, key), logged(plain, key), rtol=0, atol=2e-5)


def test_an_adapter_on_packed_rows(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    plain = online.trained(tmp_path / "a", 4, 4, peft_config=adapter)
    torch.manual_seed(0)
    packs = online.trained(tmp_path / "b", 4, 4, peft_config=adapter, scoring="packed", tokens_per_pass=40)
    assert_alike(packs, plain)
    torch.manual_seed(0)
    still = online.trained(tmp_path / "c", 4, 4, peft_config=adapter, learning_rate=0.0)
    assert any(not torch.equal(a, b) for a, b in zip(online.weights(packs), online.weights(still), strict=True))


def test_a_first_step_without_a_member_leaves_the_anchor_to_the_second(tmp_path, monkeypatch):
    def none_at_first(completions, **_):
        return [None if row < 8 else float((7 * row) % 5) for row in range(len(completions))]

    monkeypatch.setattr(online, "reward", none_at_first)
    options = {"num_iterations": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "steps": 2}
    plain = online.trained(tmp_path / "a", 4, 4, **options)
    packs = online.trained(tmp_path / "b", 4, 4, scoring="packed", **options)
    assert_alike(packs, plain)


class SameCompletions:
    """Those of `online.Fixed`."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        return [online.completion(self.state.global_step, row) for row in range(len(prompt_ids))], None


class Stock(SameCompletions, GRPOTrainer):
    """TRL's own."""


class Fast(SameCompletions, FastGRPOTrainer):
    """Ours."""


def two_of_four_groups_tied(completions, **_):
    """And two graded ones."""
    return [float((7 * row) % 5) if row // online.GROUP % 2 else 1.0 for row in range(len(completions))]


def trained(kind, folder, reward=online.reward, **options):
    config = GRPOConfig if kind is Stock else FastGRPOConfig
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, **ARGUMENTS, **options}
    tiny_lm.model().save_pretrained(folder / "start")  # a penalty needs the model a second time
    given["model_init_kwargs"] = {"dtype": "float32"}
    trainer = kind(
        model=str(folder / "start"),
        reward_funcs=reward,
        args=config(output_dir=str(folder), **given),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS]),
        processing_class=tiny_lm.tokenizer(),
    )
    trainer.train()
    return trainer


LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo"},
    "a penalty": {"loss_type": "grpo", "beta": 0.1},
    "an entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.5},
    "some of the tokens": {"loss_type": "grpo", "top_entropy_quantile": 0.5},
    "a rollout of two steps": {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "two rollouts a step": {"loss_type": "dapo", "gradient_accumulation_steps": 8, "steps_per_generation": 4},
}


@pytest.mark.parametrize("tokens", [20, "auto"])
@pytest.mark.parametrize("reward", [online.reward, two_of_four_groups_tied])
@pytest.mark.parametrize("name", LOSSES)
def test_trls_losses_on_packed_rows(tmp_path, name, reward, tokens):
    options = {"num_iterations": 2, **LOSSES[name]}
    stock = trained(Stock, tmp_path / "a", reward, **options)
    fast = trained(Fast, tmp_path / "b", reward, scoring="packed", tokens_per_pass=tokens, **options)
    assert_alike(fast, stock)
    torch.testing.assert_close(logged(fast, "loss"), logged(stock, "loss"), rtol=0, atol=1e-6)


def test_padded_rows_go_the_way_of_trl(tmp_path):
    stock, same = trained(Stock, tmp_path / "a"), trained(Fast, tmp_path / "b")
    for mine, other in zip(online.weights(same), online.weights(stock), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", ["adpo", "grpo"])
def test_groups_without_gradient_go_through_no_pass(tmp_path, monkeypatch, kind):
    """Half of the groups: half of the rows."""
    seen = []
    repacked = scorer.repacked

    def watched(rows, *rest):
        seen.append(len(rows.input_ids))
        return repacked(rows, *rest)

    monkeypatch.setattr(scorer, "repacked", watched)
    options = {"num_iterations": 1, "max_steps": 1, "scoring": "packed"}
    if kind == "grpo":
        trainer = trained(Fast, tmp_path, two_of_four_groups_tied, loss_type="grpo", **options)
    else:
        monkeypatch.setattr(online, "reward", two_of_four_groups_tied)
        trainer = online.trained(tmp_path, 4, 4, steps=1, num_iterations=1, scoring="packed")
    assert seen == [8]
    assert logged(trainer, "adpo/rows_left_out").tolist() == [0.5]


@pytest.mark.parametrize("kind", ["adpo", "grpo"])
def test_a_pass_that_memory_does_not_hold_is_made_again_as_two(tmp_path, monkeypatch, caplog, kind):
    def run(folder, **options):
        if kind == "grpo":
            return trained(Fast, folder, loss_type="grpo", scoring="packed", **options)
        return online.trained(folder, 4, 4, scoring="packed", **options)

    expected = run(tmp_path / "a")
    memory = Small(monkeypatch, 60)
    with caplog.at_level(logging.WARNING, "adpo"):
        found = run(tmp_path / "b", gradient_checkpointing=None)
    assert found.accelerator.unwrap_model(found.model).is_gradient_checkpointing  # memory is that short
    assert "activations are made again" in caplog.text
    assert_alike(found, expected)
    assert memory.failures == sum("out of memory with" in record.message for record in caplog.records) == 1
    assert found.scorer.budget.tokens <= 60


def test_memory_that_holds_nothing_is_one_line(tmp_path, monkeypatch):
    Small(monkeypatch, 0)
    with pytest.raises(ValueError, match="out of memory with the smallest pass there is"):
        online.trained(tmp_path, 4, 4, scoring="packed")
