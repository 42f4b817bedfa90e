"""Runs that can teach nothing: a warning with the cause on the way, and no success at the end."""

import logging
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import test_trl_online as online
import tiny_lm
import torch
import two_processes
from datasets import Dataset

from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer
from adpo.trainers.monitors.gradient_monitor import STEPS, GradientMonitor, causes_of
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer


def test_causes_are_told_apart():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [0.0, 1.0], [torch.nan, torch.nan]])
    member = torch.ones(6, 2, dtype=torch.bool)
    member[5] = False
    cut = torch.zeros(6, 2, dtype=torch.bool)
    cut[3] = True
    assert causes_of(rewards, member, cut) == {"right": 1, "wrong": 1, "equal": 1, "cut": 1, "left out": 1}


def test_cut_members_that_left_their_group_are_the_cause():
    nobody, everybody = torch.zeros(1, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)
    assert causes_of(torch.ones(1, 2), nobody, everybody) == {"cut": 1}


def warned(caplog, shares, causes):
    monitor = GradientMonitor(limit=7)
    with caplog.at_level(logging.WARNING, "adpo"):
        for share in shares:
            monitor.rollout(causes)
            monitor.step(share)
    return [record.getMessage() for record in caplog.records], monitor


def test_a_warning_names_cause_and_setting(caplog):
    lines, monitor = warned(caplog, [1.0] * STEPS, {"cut": 3, "right": 1})
    (line,) = lines
    assert "100 % of groups were without gradient in the last 20 steps" in line
    assert "75 % of them because all completions were cut at the length limit of 7" in line
    assert "raise max_completion_length" in line
    assert monitor.steps_with_gradient == 0


def test_it_is_not_repeated_at_every_step(caplog):
    assert len(warned(caplog, [1.0] * (2 * STEPS + 3), {"wrong": 1})[0]) == 2


@pytest.mark.parametrize("shares", [[1.0] * (STEPS - 1), [0.9] * STEPS, [1.0, 0.7] * STEPS])
def test_no_warning_where_enough_groups_have_a_gradient(caplog, shares):
    assert warned(caplog, shares, {"equal": 1})[0] == []


def test_the_state_goes_on():
    monitor, other = GradientMonitor(), GradientMonitor()
    monitor.rollout({"right": 2})
    monitor.step(0.5)
    other.load_state_dict(monitor.state_dict())
    assert (other.steps, other.steps_with_gradient, other.causes) == (1, 1, Counter(right=2))


# Trainers.


def equal_rewards(monkeypatch, value):
    monkeypatch.setattr(online, "reward", lambda completions, **_: [value] * len(completions))


@pytest.mark.parametrize(
    ("value", "cause"), [(1.0, "got reward 1"), (0.0, "got reward 0"), (0.3, "the same reward")]
)
def test_a_run_of_equal_rewards_says_so(tmp_path, monkeypatch, caplog, value, cause):
    equal_rewards(monkeypatch, value)
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = online.trained(tmp_path, 8, 2, steps=2)
    assert trainer.weights_moved.moved is False
    said = trainer.weights_moved.verdict()
    assert said.startswith("nothing was learnt: no weight changed in 2 optimizer steps: no group had a gradient")
    assert cause in said
    assert said in [record.getMessage() for record in caplog.records]


def test_a_run_with_gradients_has_no_such_verdict(tmp_path):
    trainer = online.trained(tmp_path, 8, 2, steps=2)
    assert trainer.weights_moved.moved is True
    assert trainer.weights_moved.verdict() is None
    assert trainer.gradient_monitor.steps_with_gradient == 2


def test_a_learning_rate_of_zero_is_found_too(tmp_path):
    said = online.trained(tmp_path, 8, 2, steps=2, learning_rate=0.0).weights_moved.verdict()
    assert "2 of them had a gradient" in said
    assert "learning rate" in said


def test_groups_with_equal_rewards_have_a_gradient_away_from_the_anchor(tmp_path, monkeypatch):
    """By coefficients, not by rewards: with a fixed anchor, the second rollout's tied groups pull back to it."""
    values = iter([[0.0, 1.0, 2.0, 3.0] * 4, [1.0] * 16])
    monkeypatch.setattr(online, "reward", lambda completions, **_: next(values))
    options = {"num_iterations": 1, "anchor": "fixed", "target": "boltzmann"}
    trainer = online.trained(tmp_path, 8, 2, steps=2, **options)
    assert trainer.gradient_monitor.causes["right"] == 4
    assert trainer.gradient_monitor.steps_with_gradient == 2


def test_a_resumed_run_compares_with_its_own_start(tmp_path, monkeypatch):
    equal_rewards(monkeypatch, 1.0)
    options = {"save_strategy": "steps", "save_steps": 2}
    online.trained(tmp_path, 8, 2, steps=2, **options)
    trainer = online.trained(tmp_path, 8, 2, steps=4, resume=tmp_path / "checkpoint-2", **options)
    assert "no weight changed in 4 optimizer steps" in trainer.weights_moved.verdict()
    assert trainer.gradient_monitor.steps == 4


@pytest.mark.parametrize(("graded", "moved"), [(False, False), (True, True)])
def test_the_methods_of_trl(tmp_path, graded, moved):
    def reward(completions, **_):
        return [float(number) if graded else 1.0 for number in range(len(completions))]

    args = FastGRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS])
    trainer = FastGRPOTrainer(
        tiny_lm.model(), reward, args, train_dataset=rows, processing_class=tiny_lm.tokenizer()
    )
    trainer.train()
    assert trainer.weights_moved.moved is moved
    assert (trainer.gradient_monitor.steps_with_gradient == 2) is moved
    assert ("got reward 1" in str(trainer.weights_moved.verdict())) is not moved


@pytest.mark.parametrize(("rewards", "moved"), [([1, 1, 1], False), ([1, 2, 3], True)])
def test_lists_without_preference(tmp_path, rewards, moved):
    rows = [{"prompt": "1+1=", "completions": ["1", "2", "3"], "rewards": rewards}] * 4
    args = ListwiseConfig(
        str(tmp_path),
        cache=str(tmp_path),
        max_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = ListwiseTrainer(tiny_lm.model(), args, rows, None, tiny_lm.tokenizer())
    trainer.train()
    assert trainer.weights_moved.moved is moved
    assert ("no preference in the data" in str(trainer.weights_moved.verdict())) is not moved


# Two processes.


def then_tied(folder, size, accumulation, processes=1):
    """Steps 1 and 3 have a gradient, step 2 has none: an optimizer with momentum would move by zeros."""
    rewards = iter([None, 1.0, None])

    def reward(completions, **_):
        value = next(rewards)
        return [float(len(text)) if value is None else value for text in completions]

    online.reward = reward
    options = {"num_iterations": 1, "optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 0.01}
    return online.trained(folder, size, accumulation, processes=processes, **options)


def test_a_step_without_gradient_moves_nothing_in_two_processes_either(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "reward", online.reward)
    alone = online.weights(then_tied(tmp_path / "alone", 8, 2))
    found = two_processes.run(__file__, tmp_path)
    assert found.returncode == 0, found.stderr[-2000:]
    for rank in range(2):
        together = torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True)
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


if __name__ == "__main__":
    trainer = then_tied(Path(sys.argv[1]) / "together", 4, 2, processes=2)
    rank = trainer.accelerator.process_index
    torch.save(online.weights(trainer), Path(sys.argv[1]) / f"weights-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


def test_a_decay_of_weights_teaches_nothing(tmp_path, monkeypatch):
    """TRL's gradient of equal rewards is zero, and its optimizer decays weights all the same."""
    equal_rewards(monkeypatch, 1.0)
    args = FastGRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=4,
        max_steps=2,
        weight_decay=0.1,
        learning_rate=0.1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS])
    trainer = FastGRPOTrainer(
        tiny_lm.model(), online.reward, args, train_dataset=rows, processing_class=tiny_lm.tokenizer()
    )
    trainer.train()
    assert trainer.weights_moved.moved is True
    said = trainer.weights_moved.verdict()
    assert said.startswith("nothing was learnt: no group had a gradient in 2 optimizer steps")
    assert "got reward 1" in said


def test_a_run_without_steps_teaches_nothing(tmp_path):
    said = online.trained(tmp_path, 8, 2, steps=0).weights_moved.verdict()
    assert said == "nothing was learnt: no optimizer step was made; see max_steps and num_train_epochs"
