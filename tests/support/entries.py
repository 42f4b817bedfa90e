"""The three trainers made alike, on models of a few thousand weights, with completions that are known."""

import tiny_lm
import torch
from datasets import Dataset
from test_trl_online import completion
from transformers import AutoConfig, AutoModelForCausalLM

from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer
from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

ONLINE = {"adpo": (ADPOTrainer, ADPOConfig), "grpo": (FastGRPOTrainer, FastGRPOConfig)}
ENTRIES = [*ONLINE, "lists"]
GROUP, LENGTH = 4, 5
COMMON = {
    "max_steps": 2,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}
SIZES = {
    "vocab_size": 2 + len(tiny_lm.CHARACTERS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def model_of(name, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **options})).eval()


def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def lists():
    return [
        {
            "prompt": f"{i}+{i + 1}=",
            "completions": [f"{2 * i + 1}", "0" * (i + 1), "-3"],
            "rewards": [2.0, 1.0, 0.0],
        }
        for i in range(4)
    ]


def made(entry, folder, model=None, adapter=None, sampled=False, reward=digits, data=None, **options):
    """A trainer; ``sampled`` completions are the model's own, the others depend on step and row alone."""
    model = tiny_lm.model() if model is None else model
    tokenizer = options.pop("tokenizer", None) or tiny_lm.tokenizer()
    more = {name: options.pop(name) for name in ("callbacks", "eval_dataset") if name in options}
    if entry == "lists":
        arguments = {**COMMON, "per_device_train_batch_size": 4, "tau": 1.0, **options}
        args = ListwiseConfig(str(folder / "out"), cache=str(folder / "cache"), **arguments)
        rows = Dataset.from_list(lists()) if data is None else data
        return ListwiseTrainer(
            model, args, rows, processing_class=tokenizer, peft_config=adapter, **{"eval_dataset": None, **more}
        )
    trainer_class, config = ONLINE[entry]
    arguments = {
        **COMMON,
        "per_device_train_batch_size": 2 * GROUP,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "shuffle_dataset": False,
        **({"truncated": "keep"} if entry == "adpo" else {}),
        **options,
    }
    trainer = trainer_class(
        model,
        reward,
        config(str(folder / "out"), **arguments),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in lists()]) if data is None else data,
        processing_class=tokenizer,
        peft_config=adapter,
        **more,
    )
    if not sampled:
        trainer._generate_single_turn = lambda ids, *_, **__: (
            [completion(trainer.state.global_step, row) for row in range(len(ids))],
            None,
        )
    return trainer


def weights(trainer):
    """By the names that they have in a model that nothing is wrapped around."""
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return {name: value.detach().clone() for name, value in policy.named_parameters()}


def trained(entry, folder, **options):
    """The trainer after its steps, and which of its weights have moved."""
    trainer = made(entry, folder, **options)
    before = weights(trainer)
    trainer.train()
    return trainer, {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
