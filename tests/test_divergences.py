"""Divergences against their textbook sums, scipy, and a linear programme."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats
from scipy.special import rel_entr

import adpo
from adpo.core.divergences import alpha
from adpo.core.targets import soft
from adpo.core.targets import teacher as teacher_target

distributions = st.integers(2, 6).flatmap(
    lambda k: st.tuples(*[st.lists(st.floats(0.05, 1.0), min_size=k, max_size=k)] * 2)
)


def pair(draw):
    q, p = (np.array(values) / sum(values) for values in draw)
    return q, p


def between(divergence, q, p, **signals):
    """D(q, p) through the objective, with log p as log-probabilities and the zero anchor."""
    logp = torch.tensor(np.log(p))[None]
    return adpo.Objective(soft(), divergence).loss(logp, None, q=torch.tensor(q)[None], **signals).item()


@given(distributions)
def test_kullback_leibler_both_ways(draw):
    q, p = pair(draw)
    assert between(adpo.cross_entropy, q, p) == pytest.approx(-(q * np.log(p)).sum())
    assert between(adpo.forward_kl, q, p) == pytest.approx(rel_entr(q, p).sum(), abs=1e-12)
    assert between(adpo.reverse_kl, q, p) == pytest.approx(rel_entr(p, q).sum(), abs=1e-12)


@pytest.mark.parametrize("a", [-1.5, -0.2, 0.2, 0.5, 0.7, 1.5, 3.0])
@given(draw=distributions)
def test_alpha(a, draw):
    q, p = pair(draw)
    expected = ((q**a * p ** (1 - a)).sum() - 1) / (a * (a - 1))
    assert between(alpha(a), q, p) == pytest.approx(expected, rel=1e-9, abs=1e-11)


@given(distributions)
def test_alpha_has_its_limits_and_no_cancellation_near_them(draw):
    q, p = pair(draw)
    forward, reverse = between(adpo.forward_kl, q, p), between(adpo.reverse_kl, q, p)
    assert alpha(1.0) is adpo.forward_kl
    assert alpha(0.0) is adpo.reverse_kl
    for a, limit in {1 + 1e-9: forward, 1 - 1e-9: forward, 1e-9: reverse, -1e-9: reverse}.items():
        assert between(alpha(a), q, p) == pytest.approx(limit, rel=1e-6, abs=1e-12)


def test_alpha_between_zero_and_one_is_finite_against_zeros():
    q, p = np.array([1.0, 0.0]), np.array([0.25, 0.75])
    for a in (0.3, 0.5, 0.9):
        assert between(alpha(a), q, p) == pytest.approx((0.25 ** (1 - a) - 1) / (a * (a - 1)))
    assert between(alpha(2.0), q, p) == pytest.approx((1 / 0.25 - 1) / 2)


@given(distributions, st.integers(0, 1000))
def test_wasserstein_of_order_one_agrees_with_scipy(draw, seed):
    q, p = pair(draw)
    x = np.random.default_rng(seed).normal(size=len(q)).round(1)  # rounding makes equal positions
    expected = stats.wasserstein_distance(x, x, q, p)
    value = between(adpo.wasserstein(1), q, p, rewards=torch.tensor(x)[None])
    assert value == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_wasserstein_is_the_cheapest_plan(order):
    rng = np.random.default_rng(0)
    for _ in range(5):
        k = 5
        q, p, x = rng.dirichlet(np.ones(k)), rng.dirichlet(np.ones(k)), rng.normal(size=k)
        cost = np.abs(x[:, None] - x[None, :]) ** order
        rows = np.kron(np.eye(k), np.ones(k))
        columns = np.kron(np.ones(k), np.eye(k))
        plan = optimize.linprog(
            cost.ravel(),
            np.vstack([rows, columns]) * 0,
            np.zeros(2 * k),
            A_eq=np.vstack([rows, columns]),
            b_eq=np.concatenate([q, p]),
        )
        value = between(adpo.wasserstein(order), q, p, positions=torch.tensor(x)[None])
        assert value == pytest.approx(plan.fun, rel=1e-6)


def test_wasserstein_takes_positions_before_rewards_and_ranks_as_places():
    q, p = np.array([0.0, 1.0]), np.array([1 - 1e-12, 1e-12])
    metric = adpo.wasserstein(1)
    far, near = torch.tensor([[0.0, 7.0]]), torch.tensor([[0.0, 1.0]])
    assert between(metric, q, p, rewards=near, positions=far) == pytest.approx(7)
    assert between(metric, q, p, rewards=near) == pytest.approx(1)
    assert between(metric, q, p, ranks=torch.tensor([[4, 1]])) == pytest.approx(3)
    with pytest.raises(ValueError, match=r"wasserstein\(1\) needs the signal"):
        between(metric, q, p)


@given(distributions)
def test_every_divergence_is_zero_at_the_target_and_positive_elsewhere(draw):
    q, p = pair(draw)
    places = {"positions": torch.arange(len(q), dtype=torch.float64)[None]}
    for divergence in (
        adpo.forward_kl,
        adpo.reverse_kl,
        alpha(0.5),
        alpha(2.0),
        adpo.wasserstein(2),
    ):
        assert between(divergence, q, q, **places) == pytest.approx(0, abs=1e-12)
        if np.abs(q - p).max() > 0.01:
            assert between(divergence, q, p, **places) > 1e-6


@pytest.mark.parametrize("a", [0.1, 0.3, 0.49, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("gap", [100.0, 3000.0, 20000.0])
def test_alpha_stays_bounded_far_away(a, gap):
    """Between 0 and 1 it never exceeds 1/(a(1 - a)), and its gradient dies out."""
    objective = adpo.Objective(soft(), alpha(a))
    logp = torch.tensor([[0.0, gap, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.5, 1e-30, 0.5]], dtype=torch.float64)
    loss, c = objective.loss(logp, None, q=q).item(), objective.coefficients(logp, None, q=q)
    assert 0 <= loss <= 1 / (a * (1 - a)) + 1e-9
    assert torch.isfinite(c).all()


@pytest.mark.parametrize("a", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("target", [adpo.top1(), adpo.plackett_luce()])
def test_alpha_far_from_candidates_without_mass(a, target):
    """What a target gives nothing has no part in the gradient, however improbable the policy has made it."""
    logp = torch.tensor([[0.0, -800.0]], dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0.0]])
    objective = adpo.Objective(target, alpha(a))
    assert objective.loss(logp, None, rewards=rewards).item() == pytest.approx(0, abs=1e-12)
    assert torch.equal(objective.coefficients(logp, None, rewards=rewards), torch.zeros(1, 2, dtype=torch.float64))


@pytest.mark.parametrize("a", [-0.5, 0.001, 0.3, 0.7, 2.0])
def test_alpha_against_targets_whose_mass_underflows(a):
    """log q = -1000 is mass, though exp(log q) is 0: mpmath-free truth from logarithms."""
    logp, teacher = np.array([0.0, 0.0]), np.array([0.0, -1000.0])
    log_q, log_p = teacher - np.logaddexp(*teacher), logp - np.logaddexp(*logp)
    product = a * log_q + (1 - a) * log_p
    expected = (np.exp(product).sum() - 1) / (a * (a - 1))
    objective = adpo.Objective(teacher_target(), alpha(a))
    arguments = (torch.tensor(logp)[None], None)
    signals = {"teacher_logp": torch.tensor(teacher)[None]}
    assert objective.loss(*arguments, **signals).item() == pytest.approx(expected, rel=1e-9)
    assert objective.coefficients(*arguments, **signals)[0, 0] < 0  # the teacher's candidate must rise


@pytest.mark.parametrize(
    "divergence",
    [
        adpo.cross_entropy,
        adpo.forward_kl,
        adpo.reverse_kl,
        *map(alpha, (-0.5, 0.3, 0.7, 2.0)),
        adpo.wasserstein(2),
    ],
    ids=str,
)
def test_groups_do_not_mix_and_masked_candidates_do_not_count(divergence):
    rng = np.random.default_rng(1)
    mask = torch.tensor([[True, True, True, False], [True, False, True, True], [True, True, True, True]])
    q = torch.where(mask, torch.tensor(rng.dirichlet(np.ones(4), 3)), 0.0)
    q = q / q.sum(1, keepdim=True)
    logp, places = torch.tensor(rng.normal(size=(3, 4))), torch.tensor(rng.normal(size=(3, 4)))
    objective = adpo.Objective(soft(), divergence)
    together = objective.loss(logp, None, mask=mask, q=q, positions=places, reduction="none")
    for i in range(3):
        p = np.exp(logp[i, mask[i]].numpy())
        alone = between(divergence, q[i, mask[i]].numpy(), p / p.sum(), positions=places[i, mask[i]][None])
        assert together[i].item() == pytest.approx(alone, rel=1e-9)


def test_zeros_in_the_target_of_one_group_and_not_of_the_other():
    q = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    p = torch.tensor([[0.25, 0.75], [0.2, 0.8]], dtype=torch.float64)
    for a in (0.3, 0.7, 2.0):
        losses = adpo.Objective(soft(), alpha(a)).loss(p.log(), None, q=q, reduction="none")
        expected = ((q**a * p ** (1 - a)).sum(1) - 1) / (a * (a - 1))
        torch.testing.assert_close(losses, expected)


def test_orders_that_differ_have_names_that_differ():
    assert alpha(1 / 3) != alpha(0.3333333)
    assert alpha(1 + 1e-9).name != alpha(1.0).name
    assert (alpha(0.5).name, alpha(2).name, adpo.wasserstein(2.0).name) == (
        "alpha(0.5)",
        "alpha(2)",
        "wasserstein(2)",
    )


def test_which_divergences_bear_a_target_with_zeros():
    bears = {a: alpha(a).finite_at_zeros for a in (-1.0, 0.0, 0.5, 1.0, 2.0)}
    assert bears == {-1.0: False, 0.0: False, 0.5: True, 1.0: True, 2.0: True}
    assert adpo.wasserstein().name == "wasserstein(1)"
    assert adpo.wasserstein().finite_at_zeros


def test_bad_orders_are_refused():
    with pytest.raises(ValueError, match="finite order"):
        alpha(math.nan)
    with pytest.raises(ValueError, match=r"order of at least 1; got 0\.5"):
        adpo.wasserstein(0.5)


def test_a_divergence_of_your_own():
    def total_variation(log_q, log_p, support, positions):
        return (torch.where(support, log_q.exp() - log_p.exp(), 0.0)).abs().sum(-1) / 2

    own = adpo.Divergence("total_variation", total_variation)
    assert repr(adpo.Objective(soft(), own).divergence) == "total_variation"
    assert between(own, np.array([0.5, 0.5]), np.array([0.2, 0.8])) == pytest.approx(0.3)
