"""One rule for ties: neighbours in sorted order that differ by no more than rounding are one and the same."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adpo
from adpo.core.ties import TOLERANCE, all_tied, merge_ties
from draws import DIVERGENCES, finite

TARGETS = [
    adpo.boltzmann(0.05),
    adpo.boltzmann(0.7, standardize=True),
    adpo.kde(0.7),
    adpo.top1(),
    adpo.top1(label_smoothing=0.2),
    adpo.plackett_luce(),
    adpo.plackett_luce("breslow"),
    adpo.plackett_luce(label_smoothing=0.2),
]
EVERY = [(t, d) for t in TARGETS for d in DIVERGENCES if finite(t, d)]
every = pytest.mark.parametrize(("target", "divergence"), EVERY, ids=[f"{t}/{d}" for t, d in EVERY])

SUM, THIRD = 0.1 + 0.2, 0.3  # one unit in the last place apart
NOISE = 1 + torch.finfo(torch.float32).eps  # the next float32 after 1


@every
@pytest.mark.parametrize("tied", [[SUM, THIRD, THIRD], [1e6, 1e6 * NOISE, 1e6], [-NOISE, -1.0, -1.0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_group_tied_but_for_rounding_has_no_gradient_at_the_anchor(target, divergence, tied, dtype):
    rewards = torch.tensor([tied, tied[::-1]], dtype=dtype)
    objective = adpo.Objective(target, divergence)
    zero = torch.zeros(2, 3, dtype=torch.float64)
    c = objective.coefficients(zero, None, rewards=rewards, reduction="sum")
    assert c.abs().max() < 1e-12
    assert not objective.live(c, 1.0).any()
    assert objective.diagnostics(zero, None, rewards=rewards).live.item() == 0


@every
def test_members_tied_but_for_rounding_are_treated_alike(target, divergence):
    rewards = torch.tensor(
        [[1.0, SUM, THIRD, 0.0], [SUM, THIRD, -1.0, -2.0], [0.0, 7.0, SUM, THIRD]], dtype=torch.float64
    )
    exact = torch.where(rewards == SUM, THIRD, rewards)
    u = torch.tensor([[0.5, -1.0, -1.0, 0.2], [0.3, 0.3, 0.0, 1.0], [0.1, 0.0, 2.0, 2.0]], dtype=torch.float64)
    objective = adpo.Objective(target, divergence)
    c = objective.coefficients(u, None, rewards=rewards)
    torch.testing.assert_close(c, objective.coefficients(u, None, rewards=exact))
    for row, first, second in ((0, 1, 2), (1, 0, 1), (2, 2, 3)):
        torch.testing.assert_close(c[row, first], c[row, second], rtol=0, atol=1e-14)


def test_a_pair_tied_but_for_rounding_is_silent():
    rewards = torch.tensor([[SUM, THIRD], [THIRD, SUM], [1.0, 0.0]], dtype=torch.float64)
    c = adpo.presets.dpo().coefficients(torch.randn(3, 2), None, rewards=rewards)
    assert torch.all(c[:2] == 0)
    assert torch.all(c[2] != 0)


@given(
    levels=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    scale=st.sampled_from([1e-12, 0.1, 1 / 3, 1e9]),
    weights=st.lists(st.floats(0.1, 3), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
def test_rounding_of_float32_sums_makes_no_order(levels, scale, weights, seed):
    """A reward that several functions add up, in any order, is tied with its like."""
    parts = torch.tensor(levels, dtype=torch.float32).unsqueeze(1) * torch.tensor(weights) * scale
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(parts.shape, generator=generator).argsort(1)
    rewards = torch.zeros(len(parts))
    for part in parts.gather(1, order).unbind(1):
        rewards = rewards + part
    merged = merge_ties(rewards.double()[None], torch.ones(1, len(rewards), dtype=torch.bool))[0]
    level = torch.tensor(levels)
    assert torch.equal(merged[:, None] == merged, level[:, None] == level)
    assert torch.equal(merged[:, None] > merged, level[:, None] > level)


def test_what_float32_tells_apart_well_stays_apart():
    for size in (1e-30, 1.0, 1e30):
        rewards = size * torch.tensor([[1.0, 1 + 2 * TOLERANCE, 0.0]], dtype=torch.float64)
        merged = merge_ties(rewards, torch.ones(1, 3, dtype=torch.bool))
        assert torch.equal(merged, rewards)  # untouched, not moved a little
        c = adpo.presets.anchored_top1().coefficients(torch.zeros(1, 3), None, rewards=rewards)
        assert c[0, 1] < 0 < c[0, 0]


def test_a_run_is_as_long_as_its_neighbours_are_near():
    """Each is tied with the next: the ends are, too, though they are further apart than the tolerance."""
    near = 0.9 * TOLERANCE
    chain = torch.tensor([[1.0, 1 - near, 1 - 2 * near, 1 - 3 * near, 0.5]], dtype=torch.float64)
    every = torch.ones(1, 5, dtype=torch.bool)
    assert merge_ties(chain, every)[0, :4].unique().numel() == 1
    broken = every.clone()
    broken[0, 1:3] = False
    assert merge_ties(chain, broken)[0, [0, 3]].unique().numel() == 2


def test_masked_cells_set_no_scale_and_bridge_no_gap():
    values = torch.tensor([[1.0, 1 + 5e-7, 1e9]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    assert merge_ties(values, mask)[0, :2].unique().numel() == 2
    assert merge_ties(values, ~torch.zeros_like(mask))[0, :2].unique().numel() == 1


@given(seed=st.integers(0, 1000))
def test_the_order_of_candidates_does_not_matter(seed):
    generator = torch.Generator().manual_seed(seed)
    values = (
        torch.randint(3, (4, 9), generator=generator) / 3 + 1e-7 * torch.rand(4, 9, generator=generator).double()
    )
    mask = torch.rand(4, 9, generator=generator) < 0.8
    order = torch.rand(4, 9, generator=generator).argsort(1)
    there = merge_ties(values.gather(1, order), mask.gather(1, order))
    here = merge_ties(values, mask)
    assert torch.equal(torch.where(mask, here, 0).gather(1, order), torch.where(mask.gather(1, order), there, 0))


@given(
    st.lists(st.sampled_from([SUM, THIRD, 0.2999999, 1.0, 1 - 1e-7, 0.0, -0.0, 5e-324]), min_size=1, max_size=6)
)
def test_a_list_is_all_tied_where_its_table_is(values):
    table = torch.tensor([values], dtype=torch.float64)
    merged = merge_ties(table, torch.ones_like(table, dtype=torch.bool))
    assert all_tied(values) == (merged.unique().numel() == 1)


def test_huge_rewards_do_not_overflow():
    huge = torch.tensor([[1.7e308, -1.7e308, 1.7e308]], dtype=torch.float64)
    merged = merge_ties(huge, torch.ones(1, 3, dtype=torch.bool))
    assert torch.equal(merged, huge)
    assert all(math.isfinite(x) for x in merged[0].tolist())


def test_ranks_follow_the_rule_too():
    ranks = torch.tensor([[1.0, 1 + 1e-7, 3.0]], dtype=torch.float64)
    c = adpo.presets.anchored_ranking().coefficients(torch.zeros(1, 3), None, ranks=ranks)
    assert c[0, 0] == c[0, 1]


def test_long_lists_take_no_table_of_pairs():
    values = torch.randint(1000, (2, 200_000)).double() / 7
    merged = merge_ties(values * (1 + 1e-8 * torch.rand_like(values)), torch.ones_like(values, dtype=torch.bool))
    assert merged.unique().numel() <= 1000 * 2
