"""Every refusal of `docs/support.md`, provoked: label and entry, and what to do for it."""

import json
from types import SimpleNamespace

import pytest
import torch
from entries import ENTRIES, ONLINE, made, model_of
from test_commands import words_of
from transformers import GenerationMixin, Trainer

from adpo.trainers.checkpoints import checkpoint_files as checkpoints

TRAINERS = ENTRIES
COMMANDS = ["train", "prefer"]


def trained_by(entry, **options):
    """A trainer that is made in vain."""

    def provoke(place):
        made(
            entry, place.folder, **{name: value() if callable(value) else value for name, value in options.items()}
        )

    return provoke


def typed(command, *words):
    """A command that ends with exit code 2 and one line, before it has sampled, trained or written anything."""

    def provoke(place):
        out = place.folder / "out"
        with place.monkeypatch.context() as changes:
            for kind, name in ((GenerationMixin, "generate"), (Trainer, "_inner_training_loop")):
                changes.setattr(kind, name, lambda *_, what=name, **__: pytest.fail(f"{what} was called"))
            code, _, errors = place.typed(*words_of(command, place.given, "--out", out, *words))
        assert code == 2, errors
        assert not list(out.rglob("*"))
        raise ValueError(errors.strip().splitlines()[-1].removeprefix("adpo: "))

    return provoke


def typed_on(command, change):
    """The same on a model whose configuration was changed."""

    def provoke(place):
        from transformers import AutoTokenizer

        folder = place.folder / "model"
        AutoTokenizer.from_pretrained(place.given / "model").save_pretrained(folder)
        change(folder, place.given / "model")
        typed(command, "--model", folder)(place)

    return provoke


def with_vision(folder, given):
    config = json.loads((given / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    (folder / "model.safetensors").write_bytes((given / "model.safetensors").read_bytes())


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
KNOWN = {"vocab_size": 50, "max_position_embeddings": 128}


def with_router(folder, _):
    model_of("qwen3_moe", **EXPERTS, **KNOWN, output_router_logits=True).save_pretrained(folder)


def rwkv(folder, _):
    model_of("rwkv", attention_hidden_size=16, context_length=128, **KNOWN).save_pretrained(folder)


def seeing():
    model = model_of("llama")
    model.config.vision_config = {}
    return model


def packed():
    model = model_of("llama")
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    return model


def split():
    """As transformers marks it when it is loaded with a tp_plan."""
    model = model_of("llama")
    model._tp_size = 2
    return model


def by_launcher(provoke, **variables):
    """With what accelerate's launcher sets."""

    def changed(place):
        with place.monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            provoke(place)

    return changed


def stage_3(provoke):
    """With the plugin that DeepSpeed, which is not installed here, would be configured by."""

    def changed(place):
        with place.monkeypatch.context() as changes:
            plugin = SimpleNamespace(zero_stage=3, deepspeed_config={})
            always = property(lambda _: plugin, lambda *_: None)
            changes.setattr("transformers.TrainingArguments.deepspeed_plugin", always, raising=False)
            provoke(place)

    return changed


def resumed(entry):
    def provoke(place):
        saving = {"save_strategy": "steps", "save_steps": 1}
        with place.monkeypatch.context() as two:
            two.setattr(checkpoints, "processes", lambda: 2)
            made(entry, place.folder, max_steps=1, **saving).train()
        made(entry, place.folder, max_steps=2).train(resume_from_checkpoint=True)

    return provoke


def resumed_by(command):
    def provoke(place):
        words = words_of(command, place.given, "--out", place.folder / "out", "--save_steps", "1")
        with place.monkeypatch.context() as two:
            two.setattr(checkpoints, "processes", lambda: 2)
            assert place.typed(*words)[0] == 0
        code, _, errors = place.typed(*words, "--resume")
        assert code == 2, errors
        raise ValueError(errors.strip().splitlines()[-1].removeprefix("adpo: "))

    return provoke


FSDP1 = {"fsdp": True, "fsdp_config": {"version": 1}}
KINDS = {"tensor parallel": "tp_size", "context parallel": "cp_size", "sequence parallel": "sp_size"}
FLAGS = {  # what is typed, where a command has no such setting
    "DoRA": ["--use_peft", "--use_dora", "true"],
    "QLoRA (bitsandbytes)": ["--model_init_kwargs", "{}"],
    "bf16 weights": ["--model_init_kwargs", "{dtype: bfloat16}"],
    "tools": ["--tools", "mine.py:add"],
    "environments": ["--environment_factory", "mine.py:Counter"],
    "`rollout_func`": ["--rollout_func", "mine.py:rollout"],
    "reference synchronisation": ["--sync_ref_model", "true"],
}
REFUSALS = {
    "given-twice": {"train": typed("train", "--reward", "mine.py:other")},
    "fsdp1": {
        **{entry: trained_by(entry, **FSDP1) for entry in TRAINERS},
        **{c: typed(c, "--fsdp", "full_shard", "--fsdp_config", "{version: 1}") for c in COMMANDS},
    },
    "fp16-on-a-cpu": {
        **{entry: trained_by(entry, fp16=True) for entry in TRAINERS},
        **{command: typed(command, "--fp16", "true") for command in COMMANDS},
    },
    "liger-on-a-cpu": {
        **{entry: trained_by(entry, use_liger_kernel=True) for entry in TRAINERS},
        **{command: typed(command, "--use_liger_kernel", "true") for command in COMMANDS},
    },
    "vllm-on-a-cpu": {
        **{entry: trained_by(entry, use_vllm=True) for entry in ONLINE},
        "train": typed("train", "--use_vllm", "true"),
    },
    "vllm-on-packed-weights": {
        **{entry: trained_by(entry, model=packed, use_vllm=True) for entry in ONLINE},
        "train": typed(
            *("train", "--use_vllm", "true", "--use_peft"),
            *("--model_init_kwargs", "{quantization_config: {load_in_4bit: true}}"),
        ),
    },
    "zero-3": {
        **{entry: stage_3(trained_by(entry)) for entry in TRAINERS},
        **{command: stage_3(typed(command)) for command in COMMANDS},
    },
    "split-model": {entry: trained_by(entry, model=split) for entry in TRAINERS},
    "parallelism": dict.fromkeys(TRAINERS),
    "parallelism-typed": dict.fromkeys(COMMANDS),
    "vision": {
        **{entry: trained_by(entry, model=seeing) for entry in TRAINERS},
        **{command: typed_on(command, with_vision) for command in COMMANDS},
    },
    "router-loss": {
        **{
            entry: trained_by(entry, model=lambda: model_of("qwen3_moe", **EXPERTS, output_router_logits=True))
            for entry in ("adpo", "lists")
        },
        **{command: typed_on(command, with_router) for command in COMMANDS},
    },
    "reads-padding": {
        **{entry: trained_by(entry, model=lambda: model_of("rwkv", attention_hidden_size=16)) for entry in ONLINE},
        "train": typed_on("train", rwkv),
    },
    "reference-synchronisation": {"adpo": trained_by("adpo", sync_ref_model=True)},
    "reference-synchronisation-typed": {"train": typed("train", "--sync_ref_model", "true")},
    "masks": {"adpo": trained_by("adpo", mask_truncated_completions=True)},
    "masks-typed": {"train": typed("train", "--mask_truncated_completions", "true")},
    "other-processes": {
        **{entry: resumed(entry) for entry in TRAINERS},
        **{command: resumed_by(command) for command in COMMANDS},
    },
}
"""By label and entry."""


def provoked(label, entry, feature):
    """What raises the message of a cell; None where nothing here does."""
    if label == "no-such-setting":
        return typed(entry, *FLAGS[feature]) if feature in FLAGS else None
    if label == "parallelism":
        asked = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", f"PARALLELISM_CONFIG_{KINDS[feature].upper()}": "2"}
        return by_launcher(trained_by(entry), **asked)
    if label == "parallelism-typed":
        return typed(entry, "--parallelism_config", f"{{{KINDS[feature]}: 2}}")
    return REFUSALS.get(label, {}).get(entry)


ON_VERL = "tests/on_verl/test_verl_column.py"
"""What provokes those of verl, which has an environment of its own, and compares them with the page."""
