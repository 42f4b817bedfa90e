"""What a user may say in verl's config, and what is refused before anything starts."""

import pytest
from hydra import compose, initialize_config_module
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo import core_algos

from adpo.integrations.verl import plugin, recipe  # noqa: F401  (the plug-in registers)
from adpo.integrations.verl.settings import check
from adpo.integrations.verl.trainer import dealt

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
    ranks, members, per_batch, batches = (data.draw(st.integers(1, 4)) for _ in range(4))
    per_batch *= ranks
    names = [f"g{number}" for number in range(per_batch * batches) for _ in range(members)]
    names = data.draw(st.permutations(names))
    work = data.draw(st.lists(st.integers(1, 99), min_size=len(names), max_size=len(names)))
    size = per_batch * members
    shares = dealt(names, work, size, ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(names)))
    assert {len(share) for share in shares} == {len(names) // ranks}
    for number in range(batches):
        step = size // ranks
        rows = [row for share in shares for row in share[number * step : (number + 1) * step]]
        inside = [names[row] for row in rows]
        assert all(inside.count(name) == members for name in inside)
