"""Laws that hold for every target and every divergence that is finite against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adpo
from adpo.core.ties import merge_ties
from draws import DIVERGENCES, OBJECTIVES, PAIR_TARGETS, finite, groups

every_objective = pytest.mark.parametrize(("target", "divergence"), OBJECTIVES.values(), ids=OBJECTIVES.keys())
few = settings(max_examples=5)  # of up to eight groups each


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_objective
@few
@given(g=groups(max_groups=8))
def test_coefficients_are_the_gradient_of_the_loss(target, divergence, g):
    objective = adpo.Objective(target, divergence)
    leaf = g.logp.clone().requires_grad_()
    objective.loss(leaf, g.anchor_logp, **g.arguments()).backward()
    close(objective.coefficients(g.logp, g.anchor_logp, **g.arguments()), leaf.grad, 1e-12)


@every_objective
@few
@given(g=groups(max_groups=8, ragged=False))
def test_gradient_equals_finite_differences(target, divergence, g):
    objective = adpo.Objective(target, divergence)
    direction = torch.randn(g.logp.shape, generator=g.generator, dtype=torch.float64)
    c = objective.coefficients(g.logp, g.anchor_logp, reduction="none", **g.arguments())
    step = 1e-6
    ahead, behind = (
        objective.loss(g.logp + s * direction, g.anchor_logp, reduction="none", **g.arguments())
        for s in (step, -step)
    )
    slope = (c * direction).sum(1)
    assert torch.all((slope - (ahead - behind) / (2 * step)).abs() <= 1e-5 * (1 + slope.abs()))


@every_objective
@few
@given(g=groups(max_groups=8))
def test_coefficients_sum_to_zero_and_vanish_on_masked_cells(target, divergence, g):
    c = adpo.Objective(target, divergence).coefficients(g.logp, g.anchor_logp, reduction="sum", **g.arguments())
    assert torch.all(c[~g.mask] == 0)
    assert torch.all(c.sum(1).abs() <= 1e-10 * (1 + c.abs().sum(1)))


@every_objective
@few
@given(g=groups(max_groups=8), shift=st.floats(-50, 50))
def test_shifting_a_group_changes_nothing(target, divergence, g, shift):
    objective = adpo.Objective(target, divergence)
    moved = g.logp + shift
    close(
        objective.loss(moved, g.anchor_logp, reduction="none", **g.arguments()),
        objective.loss(g.logp, g.anchor_logp, reduction="none", **g.arguments()),
        1e-8,
    )
    close(
        objective.coefficients(moved, g.anchor_logp, **g.arguments()),
        objective.coefficients(g.logp, g.anchor_logp, **g.arguments()),
        1e-8,
    )


@every_objective
@few
@given(g=groups(max_groups=8))
def test_reordering_candidates_reorders_coefficients(target, divergence, g):
    objective = adpo.Objective(target, divergence)
    order = torch.rand(g.logp.shape, generator=g.generator).argsort(1)
    c = objective.coefficients(g.logp, g.anchor_logp, **g.arguments())
    reordered = objective.coefficients(
        g.logp.gather(1, order), g.anchor_logp.gather(1, order), **g.permuted(order)
    )
    close(reordered, c.gather(1, order))


@every_objective
@few
@given(g=groups(max_groups=8, ragged=True))
def test_masked_is_the_same_as_removed(target, divergence, g):
    objective = adpo.Objective(target, divergence)
    losses = objective.loss(g.logp, g.anchor_logp, reduction="none", **g.arguments())
    c = objective.coefficients(g.logp, g.anchor_logp, reduction="none", **g.arguments())
    for i in g.real.nonzero().flatten().tolist():
        kept = g.mask[i]
        tables = {n: v[i : i + 1, kept] for n, v in g.signals().items() if n != "labels"}
        label = torch.tensor([0])  # the draw labels the first real candidate
        alone = {"tau": g.tau, "labels": label, **tables}
        logp, anchor = g.logp[i : i + 1, kept], g.anchor_logp[i : i + 1, kept]
        close(objective.loss(logp, anchor, reduction="none", **alone), losses[i : i + 1])
        close(objective.coefficients(logp, anchor, reduction="none", **alone)[0], c[i, kept])


@every_objective
@few
@given(g=groups(max_groups=8, ragged=True))
def test_masked_cells_may_hold_anything(target, divergence, g):
    objective = adpo.Objective(target, divergence)
    rubbish = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=torch.float64)

    def spoil(table):
        noise = rubbish[torch.randint(4, table.shape, generator=g.generator)]
        return torch.where(g.mask, table, noise)

    spoiled = {name: v if name == "labels" else spoil(v) for name, v in g.signals().items()}
    close(
        objective.coefficients(spoil(g.logp), spoil(g.anchor_logp), mask=g.mask, tau=g.tau, **spoiled),
        objective.coefficients(g.logp, g.anchor_logp, **g.arguments()),
        1e-12,
    )
    leaf = spoil(g.logp).requires_grad_()
    objective.loss(leaf, spoil(g.anchor_logp), mask=g.mask, tau=g.tau, **spoiled).backward()
    assert torch.isfinite(leaf.grad).all()
    assert torch.all(leaf.grad[~g.mask] == 0)


@every_objective
def test_groups_with_nothing_to_compare_are_silent_and_attached(target, divergence):
    # A group of one candidate, then a fully masked one.
    mask = torch.tensor([[False, True, False], [False, False, False]])
    leaf = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    signals = {
        "rewards": torch.zeros(2, 3),
        "labels": torch.tensor([1, 0]),
        "teacher_logp": torch.zeros(2, 3),
        "q": torch.tensor([[0.0, 1.0, 0.0]] * 2),
    }
    loss = adpo.Objective(target, divergence).loss(leaf, torch.zeros(2, 3), mask=mask, **signals)
    loss.backward()
    assert loss.item() == 0
    assert loss.requires_grad
    assert torch.all(leaf.grad == 0)


@every_objective
@few
@given(g=groups(max_groups=8))
def test_reductions_agree(target, divergence, g):
    objective = adpo.Objective(target, divergence)
    each = objective.loss(g.logp, g.anchor_logp, reduction="none", **g.arguments())
    assert torch.all(each[~g.real] == 0)
    close(objective.loss(g.logp, g.anchor_logp, reduction="sum", **g.arguments()), each.sum())
    counted = max(1, int(g.real.sum()))
    close(objective.loss(g.logp, g.anchor_logp, **g.arguments()), each.sum() / counted)
    c = objective.coefficients(g.logp, g.anchor_logp, reduction="none", **g.arguments())
    close(objective.coefficients(g.logp, g.anchor_logp, reduction="sum", **g.arguments()), c)
    close(objective.coefficients(g.logp, g.anchor_logp, **g.arguments()), c / counted)


@every_objective
@few
@given(g=groups(max_groups=8))
def test_a_temperature_per_group_equals_groups_on_their_own(target, divergence, g):
    objective = adpo.Objective(target, divergence, tau=1.7)
    taus = torch.rand(len(g.logp), generator=g.generator, dtype=torch.float64) + 0.3
    together = objective.coefficients(g.logp, g.anchor_logp, mask=g.mask, tau=taus, reduction="sum", **g.signals())
    for i, tau in enumerate(taus.tolist()):
        alone = {name: v[i : i + 1] for name, v in g.signals().items()}
        c = objective.coefficients(
            g.logp[i : i + 1], g.anchor_logp[i : i + 1], mask=g.mask[i : i + 1], tau=tau, reduction="sum", **alone
        )
        close(together[i : i + 1], c)


@pytest.mark.parametrize(
    ("target", "divergence"),
    [pair for pair in OBJECTIVES.values() if not pair[0].reads_anchor],
    ids=[name for name, pair in OBJECTIVES.items() if not pair[0].reads_anchor],
)
@few
@given(g=groups(max_groups=8))
def test_at_the_anchor_the_coefficients_do_not_depend_on_it(target, divergence, g):
    objective = adpo.Objective(target, divergence)
    here = objective.coefficients(g.logp, g.logp, **g.arguments())
    there = objective.coefficients(g.anchor_logp, g.anchor_logp, **g.arguments())
    close(here, there)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize("name", PAIR_TARGETS)
@given(g=groups(min_k=2, max_k=2))
def test_pairs_obey_the_same_laws(name, divergence, g):
    target = PAIR_TARGETS[name]
    if not finite(target, divergence):
        with pytest.raises(ValueError, match="label_smoothing"):
            adpo.Objective(target, divergence)
        return
    objective = adpo.Objective(target, divergence)
    leaf = g.logp.clone().requires_grad_()
    objective.loss(leaf, g.anchor_logp, **g.arguments()).backward()
    close(leaf.grad, objective.coefficients(g.logp, g.anchor_logp, **g.arguments()), 1e-12)
    assert torch.all(leaf.grad.sum(1).abs() <= 1e-12 * (1 + leaf.grad.abs().sum(1)))
    flipped = g.permuted(torch.tensor([[1, 0]]).expand(len(g.logp), -1))
    close(objective.coefficients(g.logp.flip(1), g.anchor_logp.flip(1), **flipped), leaf.grad.flip(1))
    silent = (g.rewards[:, 0] == g.rewards[:, 1]) | ~g.mask.all(1)
    assert torch.all(leaf.grad[silent] == 0)
    increased = {**g.arguments(), "rewards": g.rewards**3 + g.rewards}
    if not divergence.needs_positions:  # transport sees the distance, everything else the order
        close(objective.coefficients(g.logp, g.anchor_logp, **increased), leaf.grad, 1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)
@pytest.mark.parametrize("signal", ["rewards", "preference"])
@given(g=groups(min_k=2, max_k=2))
def test_pairs_equal_finite_differences_and_ignore_shifts(signal, divergence, g):
    soft = adpo.bradley_terry(label_smoothing=0.1)
    preference = torch.rand(len(g.logp), generator=g.generator, dtype=torch.float64)
    values = {"rewards": g.rewards} if signal == "rewards" else {"preference": preference, "positions": g.rewards}
    arguments = {"mask": g.mask, "tau": g.tau, "reduction": "none", **values}
    objective = adpo.Objective(soft, divergence)
    c = objective.coefficients(g.logp, g.anchor_logp, **arguments)
    direction = torch.randn(g.logp.shape, generator=g.generator, dtype=torch.float64)
    ahead, behind = (objective.loss(g.logp + s * 1e-6 * direction, g.anchor_logp, **arguments) for s in (1, -1))
    slope = (c * direction).sum(1)
    assert torch.all((slope - (ahead - behind) / 2e-6).abs() <= 1e-5 * (1 + slope.abs()))
    close(objective.coefficients(g.logp + 7, g.anchor_logp, **arguments), c, 1e-7)


RANKING = [
    adpo.top1(),
    adpo.plackett_luce(),
    adpo.plackett_luce(ties="breslow"),
    adpo.plackett_luce(label_smoothing=0.1),
]


@pytest.mark.parametrize("target", RANKING, ids=str)
@given(g=groups())
def test_ranking_targets_see_only_the_order(target, g):
    objective = adpo.Objective(target)
    original = objective.coefficients(g.logp, g.anchor_logp, mask=g.mask, rewards=g.rewards)
    stretched = g.rewards**3 + 2 * g.rewards + torch.where(g.rewards > 0, 100.0, 0.0)
    close(objective.coefficients(g.logp, g.anchor_logp, mask=g.mask, rewards=stretched), original, 1e-12)
    # The rank of a reward is one more than the number of better rewards.
    better = (g.rewards.unsqueeze(1) > g.rewards.unsqueeze(2)) & g.mask.unsqueeze(1)
    ranks = 1 + better.sum(2)
    close(objective.coefficients(g.logp, g.anchor_logp, mask=g.mask, ranks=ranks), original, 1e-12)


@pytest.mark.parametrize("target", [adpo.boltzmann(0.7, standardize=True), adpo.kde(), *RANKING], ids=str)
@given(g=groups(), scale=st.floats(0.01, 100), shift=st.floats(-100, 100))
def test_targets_without_a_unit_ignore_positive_affine_maps_that_keep_the_ties(target, g, scale, shift):
    """A large shift hides small differences behind the rounding that defines a tie: those are other data."""
    mapped = scale * g.rewards + shift

    def ties(rewards):
        merged = merge_ties(rewards, g.mask)
        return merged.unsqueeze(1) == merged.unsqueeze(2)

    both = g.mask.unsqueeze(1) & g.mask.unsqueeze(2)
    same = ~((ties(mapped) != ties(g.rewards)) & both).flatten(1).any(1)
    objective = adpo.Objective(target)
    here, there = (
        objective.coefficients(g.logp, g.anchor_logp, mask=g.mask, rewards=rewards, reduction="none")
        for rewards in (g.rewards, mapped)
    )
    assert same.any() or abs(shift) > 1000 * scale
    close(there[same], here[same], 1e-6)


@given(g=groups(min_k=2, ragged=False))
def test_raw_boltzmann_does_see_the_scale_and_not_the_shift(g):
    objective = adpo.Objective(adpo.boltzmann(1.0))
    rewards = g.rewards + torch.arange(g.rewards.shape[1])  # at least one group is not tied
    original = objective.coefficients(g.logp, g.logp, rewards=rewards)
    close(objective.coefficients(g.logp, g.logp, rewards=rewards + 3.0), original)
    tied = rewards.amax(1) == rewards.amin(1)
    scaled = objective.coefficients(g.logp, g.logp, rewards=2 * rewards)
    assert torch.all(((scaled - original).abs().amax(1) > 1e-6) | tied)


@pytest.mark.parametrize(
    "target", [adpo.plackett_luce(), adpo.plackett_luce(ties="breslow"), adpo.top1()], ids=str
)
def test_all_tied_groups_are_silent_under_a_ranking_anywhere(target):
    logp = torch.randn(3, 5, dtype=torch.float64)
    objective = adpo.Objective(target)
    assert objective.loss(logp, None, rewards=torch.full((3, 5), 0.1)).item() == 0
    assert torch.all(objective.coefficients(logp, None, rewards=torch.full((3, 5), 0.1)) == 0)


def test_an_all_tied_boltzmann_group_pulls_to_the_anchor():
    anchor = torch.randn(2, 4, dtype=torch.float64)
    objective = adpo.Objective(adpo.boltzmann(1.0, standardize=True))
    tied = torch.full((2, 4), 0.1, dtype=torch.float64)
    at_anchor = objective.coefficients(anchor, anchor, rewards=tied)
    assert at_anchor.abs().max() < 1e-15
    moved = anchor + torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    away = objective.coefficients(moved, anchor, rewards=tied)
    assert torch.all(away[:, 0] > 0.1)  # descent lowers what has risen
    assert torch.all(away[:, 1:] < 0)


@every_objective
def test_silent_groups_beside_others_make_no_nan_on_the_way(target, divergence):
    """A padding group beside a real one, with autograd on the look-out for NaN in every backward step."""
    mask = torch.tensor([[True, True, True], [False, False, False]])
    leaf = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    signals = {
        "rewards": torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "labels": torch.tensor([0, 0]),
        "teacher_logp": torch.zeros(2, 3),
        "q": torch.full((2, 3), 1 / 3),
    }
    with torch.autograd.set_detect_anomaly(True):
        adpo.Objective(target, divergence).loss(leaf, None, mask=mask, **signals).backward()
    assert torch.all(leaf.grad[1] == 0)
