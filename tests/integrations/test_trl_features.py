"""Features of TRL that run through our trainers: evaluation, iterable data, several rewards, quantised models."""

import math

import pytest
import tiny_lm
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

PROMPTS = [f"{i}+{i + 1}=" for i in range(4)]
KINDS = {"adpo": (ADPOTrainer, ADPOConfig), "grpo": (FastGRPOTrainer, FastGRPOConfig)}
both = pytest.mark.parametrize("kind", KINDS)


def rows():
    return [{"prompt": prompt, "answer": str(2 * i + 1)} for i, prompt in enumerate(PROMPTS)]


def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def made(folder, kind, reward=digits, data=None, model=None, **options):
    trainer, config = KINDS[kind]
    more = {name: options.pop(name) for name in ("eval_dataset", "peft_config") if name in options}
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 5,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        **({"truncated": "keep"} if kind == "adpo" else {}),
        **options,
    }
    return trainer(
        tiny_lm.model() if model is None else model,
        reward,
        config(**arguments),
        train_dataset=Dataset.from_list(rows()) if data is None else data,
        processing_class=tiny_lm.tokenizer(),
        **more,
    )


@both
@pytest.mark.parametrize("scoring", ["padded", "packed"])
def test_evaluation_during_training_changes_nothing(tmp_path, kind, scoring):
    held_out = Dataset.from_list([{"prompt": "9+9="}] * 4)
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": held_out, "num_generations_eval": 2}
    trainers = [made(tmp_path, kind, scoring=scoring, **more) for more in ({}, options)]
    draws = []
    for trainer in trainers:
        plain = trainer._generate_single_turn

        def seeded(*arguments, plain=plain, trainer=trainer, **rest):
            torch.manual_seed(trainer.state.global_step)  # evaluation draws, too
            return plain(*arguments, **rest)

        trainer._generate_single_turn = seeded
        trainer.train()
        draws.append([log for log in trainer.state.log_history if "eval_reward" in log])
    assert [len(found) for found in draws] == [0, 2]
    assert all(math.isfinite(log["eval_reward"]) for log in draws[1])
    for one, other in zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert trainers[1].weights_moved.moved


@both
def test_two_rewards_are_added_by_their_weights_and_none_counts_as_nothing(tmp_path, kind):
    def length(completions, **_):
        return [None if row == 0 else float(len(text)) for row, text in enumerate(completions)]

    async def constant(completions, **_):
        return [1.0] * len(completions)

    trainer = made(tmp_path, kind, [digits, length, constant], reward_weights=[2.0, 0.5, 10.0], max_steps=1)
    plain, seen = trainer._calculate_rewards, []

    def kept(inputs, prompts, completions, ids):
        found = plain(inputs, prompts, completions, ids)
        seen.append((completions, trainer.rewards.clone()))
        return found

    trainer._calculate_rewards = kept
    trainer.train()
    ((completions, rewards),) = seen
    lengths = [0.0 if row == 0 else len(text) / 2 for row, text in enumerate(completions)]
    expected = [2 * digits([text])[0] + half + 10 for text, half in zip(completions, lengths, strict=True)]
    assert rewards.tolist() == pytest.approx(expected)


@both
def test_iterable_data_give_the_run_that_a_table_gives(tmp_path, kind):
    """The same groups in the same order, to the same weights; a resumed run goes on where it was."""
    options = {"shuffle_dataset": False, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    stream = IterableDataset.from_generator(lambda: iter(rows()))
    found = []
    for name, data, resume in (("table", None, None), ("stream", stream, None), ("again", stream, "stream")):
        trainer = made(tmp_path / name, kind, data=data, max_steps=3, **options)
        checkpoint = None if resume is None else str(tmp_path / resume / "checkpoint-1")
        torch.manual_seed(0)
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append(list(trainer.model.parameters()))
        assert trainer.weights_moved.moved
    for values in zip(*found, strict=True):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[1], values[2])


QUANTISED = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("quantised", QUANTISED)
@both
def test_an_adapter_on_a_quantised_model(tmp_path, kind, quantised):
    pytest.importorskip("bitsandbytes")
    tiny_lm.model(hidden_size=64).save_pretrained(tmp_path / "model")
    config = BitsAndBytesConfig(**QUANTISED[quantised])
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = made(tmp_path / "out", kind, model=model, peft_config=adapter)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, value in trainer.model.named_parameters() if not torch.equal(value, before[n])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert trainer.weights_moved.moved
