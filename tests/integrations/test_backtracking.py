"""Steps after which a rollout's loss is above where it began are taken back, and the learning rate is halved."""

import logging
import os
import sys
from pathlib import Path

import pytest
import test_trl_online as online
import tiny_lm
import torch
import two_processes
from datasets import Dataset
from test_trl_online import trained, weights
from tiny_lm import model as small_model

from adpo.trainers.monitors.guards import TrainingStoppedError
from adpo.trainers.trl import ADPOConfig
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer
from adpo.trainers.trl.step import backtracking

INNER = 4
WILD = 100.0
"""A learning rate of plain gradient descent with which any step goes too far."""


class Grpo(FastGRPOTrainer):
    """Completions as those of `online.Fixed`."""

    _generate_single_turn = online.Fixed._generate_single_turn


def grpo(folder, steps, **options):
    arguments = {"output_dir": str(folder), "per_device_train_batch_size": 16, "num_generations": 4}
    arguments |= {"max_completion_length": 5, "max_steps": steps, "lr_scheduler_type": "constant", "optim": "sgd"}
    arguments |= {"max_grad_norm": 0.0, "num_iterations": INNER, "shuffle_dataset": False, "use_cpu": True}
    arguments |= {"bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}
    arguments |= {"disable_tqdm": True, "logging_steps": 1, "loss_type": "grpo", **options}
    trainer = Grpo(
        model=tiny_lm.model(),
        reward_funcs=online.reward,
        args=FastGRPOConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS]),
        processing_class=tiny_lm.tokenizer(),
    )
    trainer.train()
    return trainer


def adpo(folder, steps, size=16, accumulation=1, **options):
    options = {"num_iterations": INNER, **options}
    return trained(folder, size, accumulation, steps=steps, **options)


TRAINERS = pytest.mark.parametrize("train", [adpo, grpo], ids=["adpo", "grpo"])


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@TRAINERS
def test_steps_within_reach_are_those_without_it(tmp_path, train):
    plain, judged = (train(tmp_path, 6, learning_rate=0.01, backtracking=on) for on in (False, True))
    assert same(weights(judged), weights(plain))
    assert logged(judged, "adpo/rate_factor") == [1.0] * 6
    assert logged(judged, "adpo/steps_undone") == [0.0] * 6
    assert not logged(plain, "adpo/rate_factor")


@TRAINERS
def test_a_step_too_far_is_taken_back_and_the_rate_halved(tmp_path, train, caplog):
    """The first step is judged by the second pass; the third steps anew, the fourth judges it, and is left out."""
    begun = list(tiny_lm.model().parameters())
    options = {"learning_rate": WILD, "backtracking": True}
    assert not same(weights(train(tmp_path, 1, **options)), begun)  # judged by nobody yet
    with caplog.at_level(logging.INFO, "adpo"):
        after_two = train(tmp_path, 2, **options)
    assert same(weights(after_two), begun)
    (said,) = [record for record in caplog.records if "taken back" in record.message]
    assert said.levelno == logging.WARNING
    assert "learning rate times 0.5 now" in said.message
    after_four = train(tmp_path, INNER, **options)
    assert same(weights(after_four), begun)
    assert logged(after_four, "adpo/rate_factor") == [1.0, 0.5, 0.5, 0.25]
    assert logged(after_four, "adpo/steps_undone") == [0.0, 1.0, 1.0, 2.0]
    assert logged(after_four, "learning_rate") == [WILD] * INNER  # the schedule is as it was asked for


@TRAINERS
def test_a_rollout_ends_no_higher_than_it_began(tmp_path, train):
    """Whatever the rate: of what is kept at the end of it, the loss has been looked at, or it was not moved."""
    found = train(tmp_path, 10 * INNER, learning_rate=WILD, backtracking=True)
    losses = logged(found, "adpo/loss_of_groups" if train is adpo else "loss")
    undone = [0.0, *logged(found, "adpo/steps_undone")]
    for first in range(0, len(losses), INNER):
        for place in range(first + 1, first + INNER):
            taken_back = undone[place + 1] > undone[place]
            assert taken_back == (losses[place] > losses[first] + 1e-3)
    assert undone[-1] > 4
    assert logged(found, "adpo/rate_factor")[-1] < 0.1
    assert not same(weights(found), list(tiny_lm.model().parameters()))  # it gets somewhere nevertheless


def test_the_rate_comes_back(tmp_path, monkeypatch):
    """Eight rollouts without a step taken back double it."""
    monkeypatch.setattr(backtracking, "SLACK", -10.0)  # every step goes too far
    trainer = adpo(tmp_path, 2, learning_rate=1e-4, backtracking=True)
    judge = trainer.backtracking
    assert (judge.factor, judge.held) == (0.5, False)
    factors = []
    for _ in range(12):
        judge._begin(1.0)
        factors.append(judge.factor)
    assert factors[0] == 0.5  # the rollout before had a step taken back
    assert factors[8] == pytest.approx(1.0)
    assert factors[-1] == 1.0


def test_the_schedule_of_the_rate_is_left_alone(tmp_path):
    """Also where it goes on from what the optimizer has, as that of a plateau does."""
    trainer = adpo(tmp_path, 1, learning_rate=0.5, backtracking=True)
    trainer.backtracking.factor = 0.25
    trainer.backtracking._slow_down()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.125}
    trainer.backtracking.on_optimizer_step(trainer.args, trainer.state, trainer.control)
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.5}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_that_are_no_numbers_are_healed(tmp_path, monkeypatch, sign):
    """A step so long that nothing can be computed after it, whichever way the loss seems to go."""
    graded = online.reward
    rewards = lambda completions, **_: [sign * value for value in graded(completions)]  # noqa: E731
    monkeypatch.setattr(online, "reward", rewards)
    found = adpo(tmp_path, 3 * INNER, learning_rate=1e30, backtracking=True)
    assert all(torch.isfinite(value).all() for value in weights(found))
    assert found.step_guard.refused == 0
    assert found.backtracking.undone > 0


def test_micro_batches_are_judged_together(tmp_path):
    whole = adpo(tmp_path, 9, learning_rate=3.0, backtracking=True)
    cut = adpo(tmp_path, 9, size=2, accumulation=8, learning_rate=3.0, backtracking=True)
    assert whole.backtracking.undone == cut.backtracking.undone > 0
    for one, other in zip(weights(whole), weights(cut), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_of_an_adapter_the_adapter_alone_is_kept(tmp_path, monkeypatch):
    from peft import LoraConfig

    monkeypatch.setattr(backtracking, "SLACK", -10.0)  # every step goes too far

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found = adpo(tmp_path, 2, learning_rate=1.0, backtracking=True, peft_config=lora)
    assert found.backtracking.undone == 1
    assert found.backtracking.before
    assert all("lora_" in name for name in found.backtracking.before)
    began = {name: value for name, value in found.model.named_parameters() if "lora_B" in name}
    assert began
    assert all((value == 0).all() for value in began.values())  # as they were made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_iterations": 1}, "make num_iterations at least 2; got 1"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 1}, "must be equal"),
        ({"anchor": "ema"}, "does not go with anchor = ema"),
        ({"tau_schedule": "auto"}, "does not go with tau_schedule = auto"),
        ({"nll_weight": 0.1}, r"does not go with nll_weight = 0\.1"),
    ],
)
def test_where_it_cannot_judge_it_is_refused(options, words):
    arguments = {"output_dir": "unused", "use_cpu": True, "bf16": False, "num_iterations": 2, **options}
    with pytest.raises(ValueError, match=words):
        ADPOConfig(backtracking=True, **arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "a loss with loss_type = cispo"),
        ({"loss_type": "vespo"}, "a loss with loss_type = vespo"),
        ({"top_entropy_quantile": 0.5}, r"a loss with top_entropy_quantile = 0\.5"),
        ({"num_iterations": 1}, "make num_iterations at least 2; got 1"),
    ],
)
def test_losses_whose_value_says_nothing_are_refused(options, words):
    arguments = {"output_dir": "unused", "use_cpu": True, "bf16": False, "num_iterations": 2, **options}
    with pytest.raises(ValueError, match=words):
        FastGRPOConfig(backtracking=True, **arguments)


def test_dropout_is_refused(tmp_path):
    from peft import LoraConfig

    lora = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "lora_dropout": 0.3}
    options = {"backtracking": True, "peft_config": LoraConfig(**lora)}
    with pytest.raises(ValueError, match="which dropout makes random: set disable_dropout: true"):
        adpo(tmp_path, 1, disable_dropout=False, **options)
    adpo(tmp_path, 1, **options)  # where it is off, it is none


def test_a_trainer_that_trains_again_knows_its_rollouts(tmp_path):
    """Its steps are counted from zero, its rollout is the one at hand."""
    trainer = adpo(tmp_path, 6, learning_rate=0.01, backtracking=True)
    places, judge = [], trainer.backtracking
    keep, begin = judge._keep, judge._begin
    judge._keep = lambda: (places.append("kept"), keep())
    judge._begin = lambda loss: (places.append("begun"), begin(loss))
    trainer.train()
    assert places == ["kept", "begun", "kept", "kept", "kept"]  # the third and fourth step, then a new rollout


def deep():
    """Deep enough, and sure enough of itself, for rounding to be seen in its log-probabilities."""
    model = small_model(hidden_size=64, layers=6)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return model


def narrow_adpo(folder, steps, **options):
    return adpo(folder, steps, bf16=True, tau=0.02, **options)


def narrow_grpo(folder, steps, **options):
    return grpo(folder, steps, bf16=True, **options)


NARROW = pytest.mark.parametrize("train", [narrow_adpo, narrow_grpo], ids=["adpo", "grpo"])


@NARROW
def test_rounding_is_no_step_too_far(tmp_path, monkeypatch, train):
    """With a rate that moves nothing but roundings."""
    monkeypatch.setattr(tiny_lm, "model", deep)
    options = {"learning_rate": 1e-9 if train is narrow_adpo else 1e-7, "backtracking": True}
    found = train(tmp_path, 12 * INNER, **options).backtracking
    assert len(found.rises) == backtracking.SEEN
    assert all(rise > 0 for rise in found.rises)
    monkeypatch.setattr(backtracking, "_nudge", lambda _: 0.0)
    taken_for_steps = train(tmp_path, 12 * INNER, **options).backtracking.undone
    assert taken_for_steps > 2 * found.undone  # sixteen completions do not measure it well


@NARROW
def test_a_step_too_far_is_seen_above_the_rounding(tmp_path, monkeypatch, train):
    monkeypatch.setattr(tiny_lm, "model", deep)
    found = train(tmp_path, 4 * INNER, learning_rate=WILD, backtracking=True)
    assert found.backtracking.undone > 4
    assert all(torch.isfinite(value).all() for value in weights(found))
    assert logged(found, "adpo/rounding")[-1] < 10  # of wild weights it would be thousands


@NARROW
def test_of_two_steps_the_measured_one_is_the_only_one(tmp_path, monkeypatch, train):
    """No pass would judge the other: the rollouts in which rounding is measured move nothing."""
    monkeypatch.setattr(tiny_lm, "model", deep)
    found = train(tmp_path, 2 * backtracking.SEEN, num_iterations=2, learning_rate=WILD, backtracking=True)
    assert len(found.backtracking.rises) == backtracking.SEEN
    assert same(weights(found), list(deep().parameters()))


@NARROW
def test_weights_are_nudged_and_go_back(tmp_path, monkeypatch, train):
    monkeypatch.setattr(tiny_lm, "model", deep)
    begun = list(deep().parameters())
    assert same(weights(train(tmp_path, 2, learning_rate=0.0, backtracking=True)), begun)
    ended = train(tmp_path, 1, learning_rate=0.01, backtracking=True)
    assert same(weights(ended), begun)  # also of a run that ends while they are nudged
    ended.backtracking._move(backtracking.IN_BFLOAT16, 0)
    for before, after in zip(begun, weights(ended), strict=True):
        most = before.abs().clamp_min(2**-6) * 2**-12
        assert ((after - before).abs() <= 1.01 * most).all()
        assert (after != before).float().mean() > 0.99
        assert 0.2 < (after > before).float().mean() < 0.8


def test_an_adapter_that_is_zero_is_nudged_too(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found = narrow_adpo(tmp_path, 1, learning_rate=0.01, backtracking=True, peft_config=lora)
    zeros = [value for name, value in found.model.named_parameters() if "lora_B" in name]
    assert zeros
    assert not any(value.any() for value in zeros)
    found.backtracking._move(backtracking.IN_BFLOAT16, 0)
    assert all((value.abs() == 2**-18).all() for value in zeros)


def test_rounding_is_measured_where_there_is_something_to_learn(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "reward", lambda completions, **_: [1.0] * len(completions))
    assert narrow_grpo(tmp_path, 2 * INNER, learning_rate=0.01, backtracking=True).backtracking.rises == []


def test_gradients_that_are_no_numbers_still_end_a_run(tmp_path, monkeypatch):
    """Steps that are refused are counted, whatever would be measured."""
    broken = deep()
    with torch.no_grad():
        broken.lm_head.weight.mul_(float("nan"))
    monkeypatch.setattr(tiny_lm, "model", lambda: broken)
    with pytest.raises(TrainingStoppedError, match="5 optimizer steps in a row"):
        narrow_adpo(tmp_path, 4 * INNER, learning_rate=0.01, backtracking=True)


def test_narrow_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_lm, "model", lambda: small_model().to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"needs trained weights in float32.*; got torch\.bfloat16"):
        adpo(tmp_path, 1, backtracking=True)


def worker(folder, *words):
    """One of two processes: weights, what was taken back, and what rounding was measured."""
    options = {"learning_rate": 3.0, "backtracking": True, "bf16": "bf16" in words}
    trainer = adpo(folder, 9, size=4, accumulation=2, processes=2, **options)
    assert trainer.accelerator.num_processes == 2
    rank = trainer.accelerator.process_index
    judge = trainer.backtracking
    torch.save((weights(trainer), judge.undone, judge.rises), folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # threads of the process group may still be at work, and end a process that ends slowly


def of_both(folder, *words):
    result = two_processes.run(__file__, folder, *words)
    assert result.returncode == 0, result.stderr[-2000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_judge_alike(tmp_path):
    alone = adpo(tmp_path, 9, learning_rate=3.0, backtracking=True)
    for found, undone, _ in of_both(tmp_path):
        assert undone == alone.backtracking.undone > 0
        for one, other in zip(found, weights(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_two_processes_are_nudged_alike(tmp_path):
    (one, undone, rises), other = of_both(tmp_path, "bf16")
    assert (undone, rises) == other[1:]
    assert undone > 0
    assert len(rises) == 2  # of the third rollout there is one step
    assert same(one, other[0])


if __name__ == "__main__":
    worker(Path(sys.argv[1]), *sys.argv[2:])
