"""fp16: steps without gradient pass its scaler, and steps that it skips are counted."""

import logging

import pytest
import test_listwise_trainer as lists
import test_packed_online as packed_online
import test_trl_online as online
import tiny_lm
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import TrainerCallback

from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer
from adpo.trainers.trl import ADPOConfig, ADPOTrainer, TrainingStoppedError
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer
from adpo.trainers.trl.rollout.sampling import NARROW_RANGE, PolicySampler

SCALE = 2.0**10


class Sampled:
    _generate_single_turn = online.Fixed._generate_single_turn


def tied_but(*steps):
    """A reward that tells completions apart before these optimizer steps alone."""

    def reward(completions, trainer_state=None, **_):
        return [float(len(text)) if trainer_state.global_step in steps else 1.0 for text in completions]

    return reward


def rows_tied_but(*steps):
    return [
        {"prompt": "1+1=", "completions": ["2", "33"], "rewards": [1.0, 0.0] if step in steps else [1.0, 1.0]}
        for step in range(4)
    ]


def online_trainer(kind, config, folder, steps, scoring="packed", **options):
    arguments = {**packed_online.ARGUMENTS, "per_device_train_batch_size": online.GROUP, "scoring": scoring}
    return type("Kind", (Sampled, kind), {})(
        model=tiny_lm.model(),
        reward_funcs=tied_but(*steps),
        args=config(str(folder), **{**arguments, "optim": "adamw_torch", "weight_decay": 0.1, **options}),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 4),
        processing_class=tiny_lm.tokenizer(),
    )


def list_trainer(folder, steps, scoring="packed", **options):
    given = {
        **lists.COMMON,
        "per_device_train_batch_size": 1,
        "max_steps": 3,
        "anchor": "refresh",
        "anchor_every": 1,
    }
    given |= {"optim": "adamw_torch", "weight_decay": 0.1, "cache": str(folder / "cache"), "scoring": scoring}
    trainer = ListwiseTrainer(
        tiny_lm.model(),
        ListwiseConfig(str(folder), **{**given, **options}),
        Dataset.from_list(rows_tied_but(*steps)),
        processing_class=tiny_lm.tokenizer(),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return trainer


KINDS = {
    "ADPO": lambda *given, **options: online_trainer(ADPOTrainer, ADPOConfig, *given, **options),
    "GRPO": lambda *given, **options: online_trainer(FastGRPOTrainer, FastGRPOConfig, *given, **options),
    "lists": list_trainer,
}


@pytest.fixture
def scaled(monkeypatch):
    """A trainer under fp16 on the CPU, where accelerate refuses to make one."""

    def put(trainer, scale=SCALE):
        monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.accelerator.native_amp = True
        return trainer

    yield put
    AcceleratorState._reset_state()


def weights(trainer):
    return [value.detach().clone() for value in trainer.model.parameters()]


@pytest.mark.parametrize("scoring", ["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_gradient_moves_nothing_and_is_no_refused_step(tmp_path, scaled, kind, scoring):
    """Adam has momentum by the second step: a gradient of zeros would move weights."""
    if kind == "GRPO" and scoring == "padded":
        pytest.skip("TRL's own passes: a gradient of zeros, in any precision")
    trainer = scaled(KINDS[kind](tmp_path, (0,), scoring))
    found = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_, **__):
            found.append(weights(trainer))

    trainer.add_callback(Watch())
    trainer.train()
    assert len(found) == trainer.state.global_step == 3
    start = list(tiny_lm.model().parameters())
    assert any(not torch.equal(a, b) for a, b in zip(found[0], start, strict=True))
    for later in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True))
    assert trainer.step_guard.refused == 0
    assert trainer.accelerator.scaler.get_scale() == SCALE


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_the_scaler_skips_are_counted_and_end(tmp_path, scaled, monkeypatch, caplog, kind):
    """No more than the scale can be halved, and then as many as anybody bears."""
    trainer = scaled(KINDS[kind](tmp_path, range(99), max_steps=30), scale=8.0)
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    before = weights(trainer)
    with (
        caplog.at_level(logging.WARNING, "adpo"),
        pytest.raises(TrainingStoppedError, match="5 optimizer steps in a row had a gradient that is not finite"),
    ):
        trainer.train()
    assert trainer.state.global_step == trainer.step_guard.refused == 3 + 5
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert "step 1 refused: its gradient is not finite, scaled by 8 (1 so far, 0 in a row" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_the_scaler_skips_on_its_way_down_does_not_end_a_run(tmp_path, scaled, kind):
    trainer = scaled(KINDS[kind](tmp_path, range(99), max_steps=12), scale=2.0**10)

    def overflows(gradient):
        return gradient if trainer.accelerator.scaler.get_scale() <= 2.0**3 else gradient * torch.inf

    next(trainer.model.parameters()).register_hook(overflows)
    trainer.train()
    assert trainer.state.global_step == 12
    assert trainer.step_guard.refused == 7
    assert trainer.step_guard.in_a_row == 0


def test_sampling_that_fp16_rules_out_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(PolicySampler, "_why_no_fixed_cache", lambda _: NARROW_RANGE)
    for options, words in (
        ({}, "sampling is not compiled: weights in float32 and passes in float16"),
        ({"record_sampling": True}, "record_sampling has no effect: weights in float32 and passes in float16"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "adpo"):
            KINDS["ADPO"](tmp_path, (), **options)
        assert words in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(tmp_path, kind):
    """As accelerate sets it up; the second and the third step have no gradient."""
    trainer = KINDS[kind](tmp_path, (0,), "auto", use_cpu=False, fp16=True)
    trainer.train()
    assert trainer.accelerator.scaler is not None
    assert trainer.state.global_step == 3
    assert all(torch.isfinite(value).all() for value in weights(trainer))
