"""Features as flags of `adpo train` and `adpo prefer`: what is typed reaches the trainer, and it trains."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from entries import model_of
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_around import TRACKERS, Hub
from test_features import MODELS
from traces import LEFT, recorded
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import integration_utils

from adpo.trainers.trl.rollout.sampling import PolicySampler

TRAIN = {
    "--max_steps": 2,
    "--per_device_train_batch_size": 8,
    "--num_generations": 4,
    "--max_completion_length": 4,
    "--train_problems": 64,
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
    "accumulation": ["--gradient_accumulation_steps", "2"],
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
    "own decoder": ["--record_sampling", "true"],
    "continuous batching": [
        *("--use_transformers_continuous_batching", "true", "--transformers_continuous_batching_config", BLOCKS)
    ],
}
GRPO = {
    **ONLINE,
    "reference synchronisation": [*("--beta", "0.1", "--sync_ref_model", "true", "--ref_model_sync_steps", "1")],
    "masks of cut answers": ["--mask_truncated_completions", "true"],
}
METHODS = [("adpo", name) for name in ONLINE] + [
    ("grpo", name) for name in ("continuous batching", *(name for name in GRPO if name not in ONLINE))
]


def with_defaults(words, defaults):
    return [
        *words,
        *(str(part) for name, value in defaults.items() if name not in words for part in (name, value)),
    ]


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


QUICK = (
    "adpo gradient checkpointing",
    "adpo top_p",
    "adpo qlora",
    "adpo num_iterations",
    "grpo masks of cut answers",
)
"""The others are slow, all together."""


@pytest.mark.parametrize(
    ("method", "feature"),
    [
        pytest.param(*pair, id=" ".join(pair), marks=[] if " ".join(pair) in QUICK else pytest.mark.slow)
        for pair in METHODS
    ],
)
def test_train(typed, given, tmp_path, monkeypatch, method, feature):
    words = ["--method", method, *(["--truncated", "keep"] if method == "adpo" else []), *GRPO[feature]]
    out = tmp_path / "out"
    reward = ["--reward", f"{given / 'rewards.py'}:digits"]
    if feature == "masks of cut answers":  # of an untrained model nearly all
        words += ["--max_completion_length", "24"]
    if feature == "own decoder":  # without a GPU steps are taken one by one, the rest is the same
        monkeypatch.setattr(PolicySampler, "_why_no_fixed_cache", lambda _: None)
    with recorded(monkeypatch) as found:
        code, _, errors = typed(
            "train", "--model", given / "model", "--out", out, *reward, *with_defaults(words, TRAIN)
        )
    assert code == 0, errors
    assert moved(out, given / "model")
    assert feature not in LEFT or LEFT[feature](found), "it was not used"
    settings = json.loads((out / "settings.json").read_text())
    name = next(word for word in GRPO[feature] if word.startswith("--")).removeprefix("--")
    assert name in json.dumps(settings)
    sampled = json.loads((out / "summary.json").read_text())["sampling"]
    assert sampled.startswith("steps recorded") == (feature == "own decoder")


@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=pytest.mark.slow) if "compile" in name else name for name in BOTH]
)
def test_prefer(typed, given, tmp_path, monkeypatch, feature):
    out = tmp_path / "out"
    words = with_defaults(BOTH[feature], PREFER)
    with recorded(monkeypatch) as found:
        code, _, errors = typed("prefer", given / "lists.jsonl", "--model", given / "model", "--out", out, *words)
    assert code == 0, errors
    assert moved(out, given / "model")
    assert LEFT[feature](found), "it was not used"


CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={% endif %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def words_of(command, given, *more):
    """A short run of either command."""
    data = ["--reward", f"{given / 'rewards.py'}:digits", "--truncated", "keep"] if command == "train" else []
    data = data if command == "train" else [given / "lists.jsonl"]
    options = with_defaults(more, TRAIN if command == "train" else PREFER)
    first = [] if "--model" in more else ["--model", given / "model"]
    return [command, *data, *first, *options]


both = pytest.mark.parametrize("command", ["train", "prefer"])


@both
def test_chat_templates(typed, given, tmp_path, monkeypatch, command):
    """Rows of messages: the model reads what its template makes of them."""
    model = AutoTokenizer.from_pretrained(given / "model")
    model.chat_template = CHAT
    shutil.copytree(given / "model", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    chats = [[{"role": "user", "content": f"{i}+{i}"}] for i in range(40)]
    answers = [[{"role": "assistant", "content": text}] for text in "12"]
    rows = [{"prompt": chat, "completions": answers, "rewards": [0, 1]} for chat in chats]
    if command == "train":
        rows = [{"prompt": chat} for chat in chats]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = words_of(command, given, "--data", file, "--model", tmp_path / "model", "--out", out)
    if command == "prefer":
        words.remove(given / "lists.jsonl")
    with recorded(monkeypatch) as found:
        code, _, errors = typed(*words)
    assert code == 0, errors
    assert moved(out, tmp_path / "model")
    (trainer,) = found.trainers
    read = found.prompts if command == "train" else [row["prompt_ids"] for row in trainer.train_dataset]
    expected = {tuple(model(f"{i}+{i}=")["input_ids"]) for i in range(40)}
    assert read
    assert {tuple(ids) for ids in read} <= expected


@both
@pytest.mark.parametrize(
    "name", [name if "mistral" in name else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_models(typed, given, tmp_path, command, name):
    """Loaded by the command, which measures them before and after."""
    kind, options = MODELS[name]
    folder, out = tmp_path / "model", tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(given / "model")
    tokenizer.save_pretrained(folder)
    known = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    room = {"max_position_embeddings": 128}
    if "yarn" in str(options):  # a context of 32, stretched to 128
        rope = {**options["rope_parameters"], "original_max_position_embeddings": 32}
        room = {"max_position_embeddings": 32, "rope_parameters": rope}
    model_of(kind, **{**options, **room, **known, "pad_token_id": tokenizer.pad_token_id}).save_pretrained(folder)
    code, _, errors = typed(*words_of(command, given, "--model", folder, "--out", out))
    assert code == 0, errors
    assert moved(out, folder)


def test_a_model_that_reads_padding_on_lists(typed, given, tmp_path):
    """Rows of lists are padded behind their end."""
    tokenizer = AutoTokenizer.from_pretrained(given / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    known = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "context_length": 128}
    model_of("rwkv", attention_hidden_size=16, **known).save_pretrained(tmp_path / "model")
    words = words_of("prefer", given, "--model", tmp_path / "model", "--out", tmp_path / "out")
    code, _, errors = typed(*words)
    assert code == 0, errors
    assert moved(tmp_path / "out", tmp_path / "model")


@both
def test_tensorboard(typed, given, tmp_path, command):
    out = tmp_path / "out"
    code, _, errors = typed(*words_of(command, given, "--report_to", "tensorboard", "--out", out))
    assert code == 0, errors
    (file,) = out.rglob("events.*")
    events = EventAccumulator(str(file.parent)).Reload().Scalars("train/loss")
    logs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(each.step, each.value) for each in events] == [
        (log["step"], pytest.approx(log["loss"])) for log in logs if "loss" in log
    ]


@both
def test_what_is_pushed_is_whole(typed, given, tmp_path, monkeypatch, command):
    hub, out = Hub(tmp_path / "hub"), tmp_path / "out"
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *_, **__: hub)
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda *_, **__: {"name": "me"})
    more = ["--push_to_hub", "true", "--hub_model_id", "mine", "--save_steps", "1", "--out", out]
    code, _, errors = typed(*words_of(command, given, *more))
    assert code == 0, errors
    assert hub.uploads
    for place in hub.uploads:
        assert AutoModelForCausalLM.from_pretrained(place)
        assert "anchor" in (place / "README.md").read_text()
        assert not list(place.glob("checkpoint-*"))
    saved = load_file(out / "checkpoint-2" / "model.safetensors")
    last = load_file(hub.uploads[-1] / "model.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in saved.items())


def test_rewards_of_none(typed, given, tmp_path):
    out = tmp_path / "out"
    words = words_of("train", given, "--out", out)
    words[words.index(f"{given / 'rewards.py'}:digits")] = f"{given / 'rewards.py'}:none"
    code, _, errors = typed(*words)
    assert code == 0, errors
    logs = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [log["adpo/no_reward"] for log in logs if "adpo/no_reward" in log] == [0.25, 0.25]
    assert moved(out, given / "model")


@pytest.mark.slow
@both
@pytest.mark.parametrize("tracker", TRACKERS)
def test_trackers(typed, given, tmp_path, monkeypatch, command, tracker):
    """Where the package is installed; on this machine alone."""
    pytest.importorskip(tracker)
    monkeypatch.chdir(tmp_path)
    for name, value in (
        *TRACKERS[tracker].items(),
        ("WANDB_DIR", str(tmp_path)),
        ("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        monkeypatch.setenv(name, value)
    out, logged = tmp_path / "out", []
    names = {"wandb": "WandbCallback", "mlflow": "MLflowCallback", "trackio": "TrackioCallback"}
    callback = getattr(integration_utils, names[tracker])
    plain = callback.on_log
    monkeypatch.setattr(callback, "on_log", lambda *a, **k: (logged.append(k.get("logs")), plain(*a, **k))[1])
    code, _, errors = typed(*words_of(command, given, "--report_to", tracker, "--out", out))
    assert code == 0, errors
    assert len([log for log in logged if "loss" in log]) == 2
