"""vLLM in the same process, and fp16, on a CUDA device (``pytest -m gpu``); every run is a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TESTS = Path(__file__).parent.parent
LIMIT = 16


def model(folder):
    import tiny_lm
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_lm.tokenizer()
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=256,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trained(folder, kind, reward, steps=3, peft=None, **options):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from adpo.trainers.trl import ADPOConfig, ADPOTrainer
    from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

    trainer_class, config = (ADPOTrainer, ADPOConfig) if kind == "adpo" else (FastGRPOTrainer, FastGRPOConfig)
    arguments = {
        "output_dir": str(Path(folder) / "out"),
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": LIMIT,
        "max_steps": steps,
        "learning_rate": 1e-4,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "bf16": True,
        **options,
    }
    if arguments.get("use_vllm"):
        arguments |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
        arguments.setdefault("vllm_max_model_length", 64)
    trainer = trainer_class(
        AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32).cuda(),
        reward,
        config(**arguments),
        train_dataset=Dataset.from_list([{"prompt": f"{n}+{n + 1}="} for n in range(4)] * 4),
        processing_class=AutoTokenizer.from_pretrained(Path(folder) / "model", padding_side="left"),
        peft_config=peft,
    )
    cuts = []
    plain = trainer._generate

    def kept(prompts):
        found = plain(prompts)
        reasons = dict(trainer.endings.engine.reasons) if trainer.endings.engine is not None else {}
        for ids, tokens, cut in zip(found[0], found[1], trainer.endings.cut.tolist(), strict=True):
            ended = tokens[-1] in trainer.eos_token_ids
            cuts.append([len(tokens), ended, cut, reasons.get((tuple(ids), tuple(tokens)))])
        return found

    trainer._generate = kept
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return {
        "cuts": cuts,
        "moved": trainer.weights_moved.moved,
        "verdict": trainer.weights_moved.verdict(),
        "grad_norm": [log["grad_norm"] for log in logs],
        "truncated": [log["completions/truncated"] for log in logs],
        "refused": trainer.step_guard.refused if hasattr(trainer, "step_guard") else 0,
    }


def digits(completions, **_):
    return [sum(map(str.isdigit, text)) / LIMIT for text in completions]


def same(completions, **_):
    return [1.0] * len(completions)


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


VLLM = {"use_vllm": True}
KEPT = {"truncated": "keep"}
WORKERS = {
    "vllm adpo": lambda folder: trained(folder, "adpo", digits, **VLLM, **KEPT),
    "vllm grpo": lambda folder: trained(folder, "grpo", digits, **VLLM),
    "vllm stop words": lambda folder: trained(
        folder, "adpo", digits, **VLLM, **KEPT, generation_kwargs={"stop_token_ids": [2, 3, 4, 5]}
    ),
    "vllm full context": lambda folder: trained(folder, "adpo", digits, **VLLM, **KEPT, vllm_max_model_length=12),
    "vllm all cut": lambda folder: trained(folder, "adpo", digits, **VLLM, max_completion_length=1),
    "vllm lora sleeping": lambda folder: trained(
        folder, "adpo", digits, **VLLM, **KEPT, peft=lora(), vllm_enable_sleep_mode=True
    ),
    "fp16 adpo": lambda folder: trained(folder, "adpo", digits, bf16=False, fp16=True, **KEPT),
    "fp16 grpo": lambda folder: trained(folder, "grpo", digits, bf16=False, fp16=True),
    "fp16 adpo equal": lambda folder: trained(folder, "adpo", same, bf16=False, fp16=True, **KEPT),
    "fp16 grpo equal": lambda folder: trained(folder, "grpo", same, bf16=False, fp16=True),
    "own decoder": lambda folder: trained(folder, "adpo", digits, **KEPT, record_sampling=True),
    "continuous batching": lambda folder: trained(
        folder, "adpo", digits, **KEPT, use_transformers_continuous_batching=True
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("vllm")
    sys.path[:0] = [str(TESTS), str(TESTS / "integrations")]
    model(found / "model")
    return found


def run(folder, name):
    if name.startswith("vllm"):
        pytest.importorskip("vllm")
    paths = [str(TESTS), str(TESTS / "integrations"), os.environ.get("PYTHONPATH", "")]
    quiet = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    found = subprocess.run(
        [sys.executable, __file__, str(folder), name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **quiet, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-5000:]
    return json.loads(found.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "name", ["vllm adpo", "vllm grpo", "own decoder", "continuous batching", "fp16 adpo", "fp16 grpo"]
)
def test_runs_that_learn(folder, name):
    found = run(folder, name)
    assert found["moved"] is True
    assert found["verdict"] is None
    for length, ended, cut, reason in found["cuts"]:
        assert cut == (not ended)
        assert length == LIMIT or ended
        assert reason == (None if "vllm" not in name else "stop" if ended else "length")


def test_a_stop_word_at_the_limit_is_an_end(folder):
    """What ended by itself, vLLM says: neither end token nor length does."""
    found = run(folder, "vllm stop words")
    by_word = [row for row in found["cuts"] if not row[1] and row[3] == "stop"]
    assert by_word
    assert not any(cut for _, _, cut, _ in by_word)
    assert all(cut == (reason == "length") for _, _, cut, reason in found["cuts"])


def test_a_full_context_cuts_below_the_limit(folder):
    found = run(folder, "vllm full context")
    short = [row for row in found["cuts"] if not row[1]]
    assert short
    assert all(length < LIMIT and cut and reason == "length" for length, _, cut, reason in short)


def test_a_run_whose_completions_are_all_cut_does_not_end_well(folder):
    found = run(folder, "vllm all cut")
    assert found["moved"] is False
    assert min(found["truncated"]) > 0.5
    assert "all completions were cut at the length limit of 1: raise max_completion_length" in found["verdict"]
    assert set(found["grad_norm"]) == {0.0}


def test_adapters_and_an_engine_that_sleeps(folder):
    assert run(folder, "vllm lora sleeping")["moved"] is True


@pytest.mark.parametrize("name", ["fp16 adpo equal", "fp16 grpo equal"])
def test_fp16_and_steps_without_gradient(folder, name):
    found = run(folder, name)
    assert len(found["grad_norm"]) == 3
    assert found["moved"] is False
    assert "got reward 1" in found["verdict"]
    assert found["refused"] == 0


if __name__ == "__main__":
    sys.stdout.write(json.dumps(WORKERS[sys.argv[2]](sys.argv[1])) + "\n")
