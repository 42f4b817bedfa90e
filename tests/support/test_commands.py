"""Features as flags of `adpo train` and `adpo prefer`: what is typed reaches the trainer, and it trains."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

TRAIN = {
    "--max_steps": 2,
    "--per_device_train_batch_size": 8,
    "--num_generations": 4,
    "--max_completion_length": 4,
    "--eval_problems": 4,
    "--dev_problems": 0,
    "--eval_every": 0,
    "--logging_steps": 1,
    "--save_steps": 9,
    "--learning_rate": 1e-3,
    "--report_to": "none",
}
PREFER = {
    "--max_steps": 2,
    "--per_device_train_batch_size": 4,
    "--eval_every": 0,
    "--logging_steps": 1,
    "--learning_rate": 1e-3,
    "--tau": 1,
    "--report_to": "none",
}
FOUR_BITS = "{quant_method: bitsandbytes, load_in_4bit: true, bnb_4bit_quant_type: nf4}"
BLOCKS = "{num_blocks: 64, max_batch_tokens: 256, page_size: 16}"
BOTH = {
    "gradient checkpointing": ["--gradient_checkpointing", "true"],
    "torch.compile": ["--torch_compile", "true", "--torch_compile_backend", "eager"],
    "bf16": ["--bf16", "true"],
}
ONLINE = {
    **BOTH,
    "bf16 weights": ["--model_init_kwargs", "{dtype: bfloat16}"],
    "qlora": ["--use_peft", "--model_init_kwargs", f"{{quantization_config: {FOUR_BITS}}}"],
    "top_p": ["--top_p", "0.5"],
    "top_k": ["--top_k", "3"],
    "min_p": ["--min_p", "0.3"],
    "repetition_penalty": ["--repetition_penalty", "1.3"],
    "num_iterations": ["--num_iterations", "2"],
    "steps_per_generation": ["--steps_per_generation", "2"],
    "continuous batching": [
        *("--use_transformers_continuous_batching", "true", "--transformers_continuous_batching_config", BLOCKS)
    ],
}
GRPO = {
    **ONLINE,
    "reference synchronisation": [*("--beta", "0.1", "--sync_ref_model", "true", "--ref_model_sync_steps", "1")],
    "masks of cut answers": ["--mask_truncated_completions", "true"],
}
METHODS = [("adpo", name) for name in ONLINE] + [("grpo", name) for name in GRPO]


def with_defaults(words, defaults):
    return [*words, *(str(part) for name, value in defaults.items() if name not in words for part in (name, value))]


def weights(folder):
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= load_file(file)
    return found


def moved(out, start):
    """Whether what the run saved differs from what it began with."""
    saved = weights(json.loads((out / "summary.json").read_text())["checkpoint"])
    begun = weights(start)
    if any("lora_B" in name for name in saved):  # which begins as zeros
        return any(value.abs().sum() > 0 for name, value in saved.items() if "lora_B" in name)
    return any(not torch.equal(value.float(), begun[name].to(value).float()) for name, value in saved.items())


@pytest.mark.parametrize(("method", "feature"), METHODS, ids=[" ".join(pair) for pair in METHODS])
def test_train(typed, given, tmp_path, method, feature):
    words = ["--method", method, *(["--truncated", "keep"] if method == "adpo" else []), *GRPO[feature]]
    out = tmp_path / "out"
    reward = ["--reward", f"{given / 'rewards.py'}:digits"]
    if feature == "masks of cut answers":  # of an untrained model nearly all
        words += ["--max_completion_length", "24"]
    code, _, errors = typed(
        "train", "--model", given / "model", "--out", out, *reward, *with_defaults(words, TRAIN)
    )
    assert code == 0, errors
    assert moved(out, given / "model")
    settings = json.loads((out / "settings.json").read_text())
    name = next(word for word in GRPO[feature] if word.startswith("--")).removeprefix("--")
    assert name in json.dumps(settings)


@pytest.mark.parametrize("feature", BOTH)
def test_prefer(typed, given, tmp_path, feature):
    out = tmp_path / "out"
    words = with_defaults(BOTH[feature], PREFER)
    code, _, errors = typed("prefer", given / "lists.jsonl", "--model", given / "model", "--out", out, *words)
    assert code == 0, errors
    assert moved(out, given / "model")
