"""Trainers that keep, of every completion that vLLM sampled, what is known of it."""

from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

KINDS = {"adpo": (ADPOTrainer, ADPOConfig), "grpo": (FastGRPOTrainer, FastGRPOConfig)}
LIMIT = 16
ROUNDING = 1e-4
"""Nats a token between vLLM's log-probabilities and the trainer's, both in float32; bfloat16 alone makes 4e-3."""


def digits(completions, **_):
    return [sum(map(str.isdigit, text)) / LIMIT for text in completions]


def made(kind, folder, model, adapter=False, **options):
    trainer_class, config = KINDS[kind]
    arguments = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": LIMIT,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        **({"truncated": "keep"} if kind == "adpo" else {}),
        **options,
    }
    peft = None
    if adapter:
        from peft import LoraConfig

        peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(Path(model), dtype=torch.float32),
        digits,
        config(**arguments),
        train_dataset=Dataset.from_list([{"prompt": f"{n}+{n + 1}="} for n in range(4)] * 8),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=peft,
    )
    keep(trainer)
    return trainer


REWARD = """
def digits(completions, **_):
    return [sum(map(str.isdigit, text)) / 16 for text in completions]
"""


def command_line(folder, model, **more):
    """A short `adpo train` of that model with vLLM."""
    (folder / "rewards.py").write_text(REWARD)
    words = {
        "model": model,
        "reward": f"{folder / 'rewards.py'}:digits",
        "out": folder / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": LIMIT,
        "eval_problems": 4,
        "dev_problems": 0,
        "learning_rate": 1e-3,
        "report_to": "none",
        "bf16": False,
        "use_vllm": True,
        **more,
    }
    typed = {
        f"--{name}": str(value).lower() if isinstance(value, bool) else str(value) for name, value in words.items()
    }
    return ["train", *(part for pair in typed.items() for part in pair)]


def keep(trainer):
    """`kept`: rollouts of (tokens, cut, finish reason, distance to the policy's own log-probabilities)."""
    plain, trainer.kept = trainer._generate, []

    def generate(prompts):
        found = plain(prompts)
        rows = zip(found[0], found[1], found[4], trainer.endings.cut.tolist(), strict=True)
        reasons = trainer.endings.engine.reasons
        trainer.kept.append(
            [
                (tokens, cut, reasons.get((tuple(prompt), tuple(tokens))), gap(trainer, prompt, tokens, logp))
                for prompt, tokens, logp, cut in rows
            ]
        )
        return found

    trainer._generate = generate


@torch.no_grad()
def gap(trainer, prompt, tokens, logp):
    policy = trainer.accelerator.unwrap_model(trainer.model)
    ids = torch.tensor([[*prompt, *tokens]])
    own = (policy(ids).logits[0, len(prompt) - 1 : -1] / trainer.temperature).log_softmax(-1)
    own = own.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return float((own - torch.tensor(logp)).abs().max())


def report(trainer):
    """As JSON: what the run was like."""
    logs = trainer.state.log_history
    return {
        "rollouts": [[list(row) for row in rollout] for rollout in trainer.kept],
        "moved": trainer.weights_moved.moved,
        "verdict": trainer.weights_moved.verdict(),
        "ends": list(trainer.eos_token_ids),
        "truncated": [log["completions/truncated"] for log in logs if "completions/truncated" in log],
    }


def check(found, rollouts=3):
    """A run that learns, from completions of the policy as it is, whose endings are vLLM's."""
    assert (found["moved"], found["verdict"]) == (True, None)
    assert len(found["rollouts"]) == rollouts
    for rows in found["rollouts"]:
        assert rows
        for tokens, cut, reason, distance in rows:
            assert distance < ROUNDING
            assert reason in ("stop", "length")
            assert cut == (reason == "length")
            assert not set(tokens[:-1]) & set(found["ends"])
            assert reason == "stop" or len(tokens) == LIMIT
    texts = [tuple(tokens) for rows in found["rollouts"] for tokens, *_ in rows]
    assert len(set(texts)) > len(texts) / 2
