"""Passes under an engine that has to be told which is the last of a step; DeepSpeed's own is in `on_deepspeed`."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from adpo.trainers.engine import OneStep, engine_of
from adpo.trainers.listwise import ListwiseConfig
from adpo.trainers.trl import ADPOConfig
from adpo.trainers.trl.grpo import FastGRPOConfig


class Engine:
    """Takes notes."""

    def __init__(self):
        self.calls = []
        self.optimizer = SimpleNamespace(
            overflow=False, cpu_offload=False, averaged_gradients={0: [torch.ones(2)]}
        )

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.calls.append("last" if is_boundary else "more")

    def backward(self, loss, scale_wrt_gas):
        assert not scale_wrt_gas
        self.calls.append(float(loss.detach()))

    def step(self):
        finite = torch.isfinite(self.optimizer.averaged_gradients[0][0]).all()
        self.optimizer.overflow = not finite
        self.calls.append("step" if finite else "refused")


def loss(value):
    return torch.tensor(value, requires_grad=True) * 1.0


ONLY_LOGGED = torch.zeros((), requires_grad=True)


def test_passes_make_one_step():
    engine = Engine()
    one = OneStep(engine)
    one.accumulate(loss(1.0), last=False)
    one.backward(ONLY_LOGGED, sync_gradients=False)
    one.accumulate(loss(2.0), last=True)
    one.backward(ONLY_LOGGED, sync_gradients=True)
    assert engine.calls == ["more", 1.0, "last", 2.0, "step"]
    assert not one.refused


def test_a_step_without_a_pass_is_none():
    engine = Engine()
    OneStep(engine).backward(ONLY_LOGGED, sync_gradients=True)
    assert engine.calls == []


def test_a_loss_of_the_trainers_own_goes_the_way_of_accelerate():
    engine = Engine()
    OneStep(engine).backward(loss(3.0), sync_gradients=True, scale_wrt_gas=False)
    assert engine.calls == ["last", 3.0, "step"]


def test_what_is_not_finite_is_refused():
    engine = Engine()
    one = OneStep(engine)
    one.accumulate(loss(1.0), last=True)
    one.spoilt = True
    one.step()
    assert engine.calls == ["last", 1.0, "refused"]
    assert one.refused
    assert not one.spoilt


def test_a_step_whose_last_pass_is_missing_is_a_mistake_in_the_program():
    one = OneStep(Engine())
    one.accumulate(loss(1.0), last=False)
    with pytest.raises(AssertionError, match="the last pass of a step was not made"):
        one.step()


def test_it_is_installed_once():
    wrapped = SimpleNamespace(engine=Engine())
    accelerator = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_engine_wrapped=wrapped)
    one = engine_of(accelerator)
    assert isinstance(one, OneStep)
    assert engine_of(accelerator) is one
    assert engine_of(SimpleNamespace(distributed_type=DistributedType.NO)) is None


@pytest.mark.parametrize(("stage", "instead"), [(0, "plain data parallelism"), (3, "FSDP2 or ZeRO 2")])
@pytest.mark.parametrize("config", [ADPOConfig, FastGRPOConfig, ListwiseConfig])
def test_other_stages_are_refused_in_one_line(tmp_path, stage, instead, config):
    args = config(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    for fine in (1, 2):
        args.deepspeed_plugin = SimpleNamespace(zero_stage=fine)
        args.check_forms()
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
    with pytest.raises(ValueError, match=f"ZeRO stage 1 or 2; got stage {stage}: use {instead}") as complaint:
        args.check_forms()
    assert "\n" not in str(complaint.value)
