"""The objects of a step, each without a trainer."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("trl")

from adpo.anchors import Snapshot
from adpo.core.temperature import ConstantTau
from adpo.trainers.monitors.auto_tau import AutoTau
from adpo.trainers.trl.rollout.members import left_out, member_columns
from adpo.trainers.trl.step.anchoring import AnchorKeeper, KLBudget, kl_budget_of
from adpo.trainers.trl.step.tau_control import TauControl

ONCE = {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 2}


def rows(count, **columns):
    mask = torch.ones(count, 1, dtype=torch.long)
    return {
        "completion_mask": mask,
        "member": torch.ones(count, dtype=torch.bool),
        "best": torch.zeros(count).double(),
        **columns,
    }


def keeper(anchor="on_policy", sharded=False, **changes):
    policy, asked = nn.Linear(1, 1, bias=False), []
    nn.init.ones_(policy.weight)

    def logp_of(some):
        asked.append(len(some["x"]))
        return (policy.weight * some["x"]).detach().view(-1).double()

    args = SimpleNamespace(
        **{**ONCE, "num_iterations": 2, "anchor": anchor, "anchor_decay": 0.5, "anchor_every": 2, **changes}
    )
    return AnchorKeeper(args, policy, logp_of, sharded=sharded), policy, asked


def test_the_policy_that_sampled_is_the_anchor_of_its_first_step():
    """What no pass has scored is scored then, members alone; later steps read what was kept."""
    anchors, policy, asked = keeper()
    anchors.sampled_at = 7
    assert anchors.coincides(7)
    assert not anchors.coincides(8)
    rollout = [rows(2, x=torch.tensor([1.0, 2.0])), rows(2, x=torch.tensor([3.0, 4.0]))]
    rollout[1]["member"][0] = False
    anchors.remember(rollout, range(1), torch.tensor([1.0, torch.nan]), 7)
    assert asked == [1, 1]  # the row that has no score in the first part, the member of the second
    with torch.no_grad():
        policy.weight.fill_(5.0)
    anchors.remember(rollout, range(1, 2), torch.tensor([9.0, 9.0]), 8)  # not the first step: nothing changes
    places = torch.arange(2)
    assert anchors.logp(rollout[0], places).tolist() == [1.0, 2.0]
    assert anchors.logp(rollout[1], places).tolist() == [0.0, 4.0]
    assert anchors.current_logp(rollout[0], places).tolist() == [5.0, 10.0]


@pytest.mark.parametrize("changes", [{"num_iterations": 1}, {"anchor": "none"}, {"anchor": "ema"}])
def test_nothing_is_kept_that_no_step_reads(changes):
    anchors, _, asked = keeper(**changes)
    anchors.sampled_at = 0
    rollout = [rows(2, x=torch.tensor([1.0, 2.0]))]
    anchors.remember(rollout, range(1), torch.full((2,), torch.nan), 0)
    assert "anchor_logp" not in rollout[0]
    assert asked == []


def test_no_anchor_and_one_that_keeps_weights():
    anchors, _, _ = keeper("none")
    assert anchors.logp(rows(1), torch.arange(1)) is None
    assert not anchors.coincides(anchors.sampled_at)
    anchors, policy, _ = keeper("fixed")
    assert anchors.coincides(3)
    with torch.no_grad():
        policy.weight.fill_(5.0)
    anchors.policy.on_step()
    assert not anchors.coincides(3)
    assert anchors.logp(rows(1, x=torch.tensor([2.0])), torch.arange(1)).tolist() == [2.0]


def test_where_parameters_are_sharded_every_row_is_scored():
    anchors, _, asked = keeper(sharded=True)
    found = anchors.current_logp(rows(3, x=torch.tensor([1.0, 2.0, 3.0])), torch.tensor([2]))
    assert found.tolist() == [3.0]
    assert asked == [3]


def test_the_kl_budget_measures_members_and_is_exceeded():
    _, policy, _ = keeper()

    def logp_of(some):
        return (policy.weight * some["x"]).detach().view(-1).double()

    args = SimpleNamespace(kl_budget=1.5, anchor="ema", logp_reduction="sum")
    budget = kl_budget_of(args, policy, None, logp_of, lambda values, reduction: values)
    batch = rows(2, x=torch.tensor([2.0, 50.0]))
    batch["member"][1] = False
    assert budget.measure(batch) == 0.0
    assert not budget.exceeded
    with torch.no_grad():
        policy.weight.fill_(2.0)
    budget.start.on_step()
    assert budget.measure(batch) == 2.0
    assert budget.exceeded
    again = KLBudget(1.5, Snapshot(policy), logp_of, per_token=False, reduce=None)
    again.load_state_dict(budget.state_dict())
    assert again.exceeded
    assert kl_budget_of(SimpleNamespace(kl_budget=None), policy, None, logp_of, None) is None


def test_tau_moves_with_what_is_measured_and_goes_on_from_its_state():
    control = TauControl(AutoTau(1.0), 1.0, one_step=True)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5, "initial_lr": 0.5}])
    assert control.measures_next_step(optimizer)
    step, places = rows(4, groups=torch.tensor([0, 0, 1, 1])), torch.arange(4)
    control.before_step(step, places, torch.zeros(4).double(), optimizer)
    moved = torch.tensor([4.0, -4.0, 4.0, -4.0]).double()
    assert control.after_step(lambda *_: moved) == {"u_spread": 4.0}
    assert control.after_step(lambda *_: moved) == {}  # measured once
    control.update(0.5, torch.tensor([1.0, torch.nan]))
    assert control.tau == 2.0  # the root of the spread
    again = TauControl(AutoTau(1.0), 1.0, one_step=True)
    again.load_state_dict(control.state_dict())
    assert (again.tau, again.schedule.measured) == (2.0, 1)
    assert not TauControl(AutoTau(), 1.0, one_step=False).measures_next_step(optimizer)
    assert not TauControl(ConstantTau(1.0), 1.0, one_step=True).measures_next_step(optimizer)
    late = SimpleNamespace(param_groups=[{"lr": 0.1, "initial_lr": 0.5}])
    assert not control.measures_next_step(late)


@pytest.mark.parametrize(
    ("truncated", "rewards", "member"),
    [
        ("zero", [1.0, 0.0, 3.0, 0.0], [True, True, True, False]),
        ("mask", [1.0, 5.0, 3.0, 2.0], [True, False, True, False]),
        ("keep", [1.0, 5.0, 3.0, 2.0], [True, True, True, False]),
    ],
)
def test_members_and_their_rewards(truncated, rewards, member):
    mask = torch.ones(4, 2, dtype=torch.long)
    batch = {"prompt_mask": mask, "completion_mask": mask}
    given = torch.tensor([1.0, 5.0, 3.0, 2.0])
    out = left_out(batch, given, torch.tensor([False, False, False, True]), context=9)
    assert {name: int(chosen.sum()) for name, chosen in out.items()} == {"no_reward": 0, "empty": 1, "too_long": 0}
    cut = torch.tensor([False, True, False, True])
    found = member_columns(given, cut, out, truncated=truncated, first=0, size=4, gather=lambda values: values)
    assert found["rewards"].tolist() == rewards
    assert found["member"].tolist() == member
    assert found["groups"].tolist() == [0] * 4
    assert found["best"].argmax() == torch.where(found["member"], found["rewards"], -torch.inf).argmax()
