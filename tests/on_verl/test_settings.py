"""What a user may say in verl's config, and what is refused before anything starts."""

import itertools

import pytest
from hydra import compose, initialize_config_module
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo import core_algos
from verl.utils.reward_score import default_compute_score

from adpo.trainers.verl import plugin, recipe  # noqa: F401  (the plug-in registers)
from adpo.trainers.verl.data import SCORED_AS
from adpo.trainers.verl.settings import check
from adpo.trainers.verl.trainer import dealt, filled

PAPER = recipe.overrides("Qwen/Qwen3-1.7B", "train.parquet", "test.parquet", nodes=2)


def config(**changed):
    lines = [f"{key}={value}" for key, value in {**PAPER, **changed}.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", lines)


def test_the_paper_s_run_is_a_config_of_verl_s():
    found = config()
    check(found)
    assert found.trainer.nnodes == 2
    assert core_algos.get_adv_estimator_fn("adpo")


LOSS = recipe.POLICY_LOSS
WRONG = {
    "target must be one of": {f"+{LOSS}.target": "bolzmann"},
    "tau must be": {f"+{LOSS}.tau": "0"},
    "a group of one": {"actor_rollout_ref.rollout.n": "1"},
    "anchor ema is not possible": {f"+{LOSS}.anchor": "ema"},
    "anchor fixed needs": {f"+{LOSS}.anchor": "fixed"},
    "adv_estimator must be": {"algorithm.adv_estimator": "grpo"},
    "shuffle must be false": {"actor_rollout_ref.actor.shuffle": "true"},
    "entropy_coeff must be 0": {"actor_rollout_ref.actor.entropy_coeff": "0.01"},
    "use_kl_loss must be false": {"actor_rollout_ref.actor.use_kl_loss": "true"},
    "tau_schedule is constant, guarded or hybrid": {f"+{LOSS}.tau_schedule": "auto"},
    "strategy must be fsdp": {"actor_rollout_ref.actor.strategy": "veomni"},
    "cannot be divided by 16 ranks": {"actor_rollout_ref.actor.ppo_mini_batch_size": "3"},
    "rollout_correction must be off": {"algorithm.rollout_correction.bypass_mode": "true"},
    "nll_weight means nothing": {f"+{LOSS}.nll_weight": "0.1"},
    "got 'auto'": {f"+{LOSS}.tau": "auto"},
    "_target_ must be": {f"{LOSS}._target_": "verl.workers.config.PolicyLossConfig"},
}


@pytest.mark.parametrize("complaint", WRONG)
def test_mistakes(complaint):
    with pytest.raises(ValueError, match=complaint):
        check(config(**WRONG[complaint]))


def test_a_fixed_anchor_has_a_reference():
    actor = "actor_rollout_ref.actor"
    check(config(**{f"+{LOSS}.anchor": "fixed", f"{actor}.use_kl_loss": "true", f"{actor}.kl_loss_coef": "0"}))


@given(st.data())
def test_every_mini_batch_holds_its_groups_whole(data):
    ranks = data.draw(st.integers(1, 4))
    size = ranks * data.draw(st.integers(2, 6))
    sizes = data.draw(st.lists(st.integers(1, size), min_size=1, max_size=9))  # some lost members on the way
    names = data.draw(st.permutations([f"g{group}" for group, count in enumerate(sizes) for _ in range(count)]))
    bins = filled(names, size)
    assert sorted(row for rows in bins for row in rows) == list(range(len(names)))
    for rows in bins:
        inside = [names[row] for row in rows]
        assert 0 < len(rows) <= size
        assert all(inside.count(name) == names.count(name) for name in inside)
    spare = iter(range(len(names), len(bins) * size))
    bins = [[*rows, *itertools.islice(spare, size - len(rows))] for rows in bins]
    work = data.draw(st.lists(st.integers(1, 99), min_size=len(bins) * size, max_size=len(bins) * size))
    shares = dealt(bins, work, ranks)
    step = size // ranks
    for number, rows in enumerate(bins):
        parts = [share[number * step : (number + 1) * step] for share in shares]
        assert sorted(row for part in parts for row in part) == sorted(rows)


def test_a_group_that_is_too_large():
    with pytest.raises(ValueError, match="does not fit into a mini-batch of 2"):
        filled(["a", "a", "a"], 2)


def test_verl_scores_the_problems_that_adpo_writes():
    assert default_compute_score(SCORED_AS, r"so it is \boxed{\frac{1}{2}}", r"\frac{1}{2}") == 1.0
    assert default_compute_score(SCORED_AS, r"so it is \boxed{3}", r"\frac{1}{2}") == 0.0
    assert default_compute_score(SCORED_AS, "who knows", "3") == 0.0
