"""Every argument of transformers and TRL is honoured, refused, or about something that is not there."""

import json
from dataclasses import fields

import pytest
import test_listwise_trainer as listwise
import test_trl_online as online
from transformers import TrainingArguments
from trl import GRPOConfig

import forked
from adpo.trainers.checks import arguments
from adpo.trainers.listwise import ListwiseConfig
from adpo.trainers.trl import ADPOConfig
from adpo.trainers.trl import arguments as of_trl
from adpo.trainers.trl.grpo import FastGRPOConfig

CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}
TRANSFORMERS = [field.name for field in fields(TrainingArguments)]
TRL = [field.name for field in fields(GRPOConfig) if field.name not in TRANSFORMERS]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_arguments_of_transformers_are_classed_once(name):
    classes = (arguments.HONOURED, arguments.REFUSED, arguments.WITHOUT_MEANING)
    assert sum(name in names for names in classes) == 1, (
        f"{name} is new: class it in adpo/trainers/checks/arguments.py"
    )


@pytest.mark.parametrize("name", TRL)
def test_arguments_of_trl_are_classed_once(name):
    classes = (of_trl.HONOURED, of_trl.MEANINGLESS)
    assert sum(name in names for names in classes) == 1, (
        f"{name} is new: class it in adpo/trainers/trl/arguments.py"
    )


OTHER = {
    "auto_find_batch_size": True,
    "ignore_data_skip": True,
    "label_smoothing_factor": 0.1,
    "length_column_name": "size",
    "neftune_noise_alpha": 5.0,
    "parallelism_config": object(),
    "train_sampling_strategy": "group_by_length",
}


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig, ListwiseConfig])
@pytest.mark.parametrize("name", arguments.REFUSED)
def test_what_would_be_without_effect_or_wrong_is_refused(tmp_path, kind, name):
    if kind is FastGRPOConfig and name == "neftune_noise_alpha":
        assert kind(str(tmp_path), **CPU, **{name: OTHER[name]}).neftune_noise_alpha == 5.0  # as in TRL
        return
    with pytest.raises(ValueError, match=f"^{name} = .* is refused: .*; leave it out$"):
        kind(str(tmp_path), **CPU, **{name: OTHER[name]})


@pytest.mark.parametrize("name", [name for name in of_trl.MEANINGLESS if name in TRL])
def test_arguments_of_other_losses_are_refused(tmp_path, name):
    default = next(field.default for field in fields(ADPOConfig) if field.name == name)
    other = not default if isinstance(default, bool) else "other" if isinstance(default, str) else 0.123
    with pytest.raises(ValueError, match=rf"^{name} = "):
        ADPOConfig(str(tmp_path), **CPU, **{name: other})


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig, ListwiseConfig])
@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise", "schedule_free_adamw"])
def test_optimizers_that_would_step_wrongly_are_refused(tmp_path, kind, name):
    with pytest.raises(ValueError, match=rf"^optim = {name} is refused"):
        kind(str(tmp_path), **CPU, optim=name)


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig, ListwiseConfig])
@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_batches_are_not_dealt_out_by_one_process(tmp_path, kind, name):
    for given in ({name: True}, json.dumps({name: True})):
        with pytest.raises(ValueError, match=f"accelerator_config: {name} is refused"):
            kind(str(tmp_path), **CPU, accelerator_config=given)


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig])
@pytest.mark.parametrize("key", of_trl.OWN_ARGUMENTS)
def test_the_sampler_is_told_nothing_that_the_scorer_does_not_know(tmp_path, kind, key):
    with pytest.raises(ValueError, match=f"generation_kwargs: {key} is refused.*set {of_trl.OWN_ARGUMENTS[key]}"):
        kind(str(tmp_path), **CPU, generation_kwargs={key: 2})
    with pytest.raises(ValueError, match=f"generation_kwargs: {key} is refused"):
        kind(str(tmp_path), **CPU, generation_kwargs=json.dumps({key: 2}))


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig])
def test_what_no_sampler_knows_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"generation_kwargs: num_beans has no effect .*; did you mean num_beams"):
        kind(str(tmp_path), **CPU, generation_kwargs={"num_beans": 2})


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig])
@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("vllm_gpu_memory_utilization", 0.7, "use_vllm"),
        ("vllm_structured_outputs_regex", "a+", "use_vllm"),
        ("transformers_continuous_batching_config", {"num_blocks": 8}, "use_transformers_continuous_batching"),
    ],
)
def test_settings_of_an_engine_that_is_not_used_are_refused(tmp_path, kind, name, value, needed):
    with pytest.raises(ValueError, match=f"^{name} = .* has no effect without {needed}"):
        kind(str(tmp_path), **CPU, **{name: value})


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("top_p", 2.0),
        ("top_p", 0.0),
        ("top_k", -3),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
    ],
)
def test_sampling_that_is_none_is_refused(tmp_path, kind, name, value):
    with pytest.raises(ValueError, match=f"^{name} = {value} is refused: expected {of_trl.EXPECTED[name][:8]}"):
        kind(str(tmp_path), **CPU, **{name: value})


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig, ListwiseConfig])
def test_settings_of_kernels_that_are_not_used_are_refused(tmp_path, kind):
    with pytest.raises(ValueError, match="liger_kernel_config has no effect without use_liger_kernel"):
        kind(str(tmp_path), **CPU, liger_kernel_config={"rms_norm": True})


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig, ListwiseConfig])
def test_liger_layers_are_scored_on_padded_rows(tmp_path, kind):
    """They put a forward pass of their own in the place of the one that packs, once training starts."""
    assert kind(str(tmp_path), **CPU).forms(sharded=False).scoring == "auto"
    assert kind(str(tmp_path), **CPU, use_liger_kernel=True).forms(sharded=False).scoring == "padded"
    with pytest.raises(ValueError, match="scoring packed does not work with use_liger_kernel"):
        kind(str(tmp_path), **CPU, use_liger_kernel=True, scoring="packed").forms(sharded=False)


WITHOUT = """
import sys
from trl import GRPOConfig
for module in [name for name in sys.modules if name.split(".")[0] == "adpo"]:  # imported anew below
    del sys.modules[module]
for name in ("delta", "vespo_k_neg", "use_transformers_paged", "sync_ref_model", "vllm_importance_sampling_cap"):
    del GRPOConfig.__dataclass_fields__[name]
    delattr(GRPOConfig, name)
GRPOConfig.__post_init__ = lambda self: setattr(self, "steps_per_generation", 1)
from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig
print(ADPOConfig("out", per_device_train_batch_size=8).tau, FastGRPOConfig("out").scoring)
"""


def test_arguments_that_trl_removes_do_not_break_the_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = forked.run("-c", WITHOUT)
    assert found.stdout.split() == ["1.0", "auto"], found.stderr


def test_a_checkpoint_without_optimizer_is_not_resumed(tmp_path):
    """transformers would go on with a new one, and not say so."""
    options = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    online.trained(tmp_path, 8, 2, steps=1, **options)
    with pytest.raises(ValueError, match="no state of the optimizer"):
        online.trained(tmp_path, 8, 2, steps=2, resume=tmp_path / "checkpoint-1", **options)
    listwise.trained(tmp_path / "lists", listwise.ragged(), steps=1, **options)
    with pytest.raises(ValueError, match="no state of the optimizer"):
        listwise.trained(tmp_path / "lists", listwise.ragged(), steps=2, resume=True, **options)
