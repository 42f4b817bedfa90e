"""Plackett-Luce: ties, stages, closed form, precision, curvature."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adpo
from adpo.core.groups import prepare
from adpo.core.targets import Target
from draws import groups


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def order_nll(u, order):
    """The negative log-likelihood of one strict order, best first, term by term."""
    total = 0.0
    for place in range(len(order) - 1):
        rest = order[place:]
        total = total + torch.logsumexp(u[list(rest)], 0) - u[rest[0]]
    return total


def orders_of(rewards):
    """All strict orders compatible with the rewards."""
    for order in itertools.permutations(range(len(rewards))):
        ranked = [rewards[i] for i in order]
        if ranked == sorted(ranked, reverse=True):
            yield order


@given(g=groups(min_k=2, ragged=False, max_groups=1))
def test_without_ties_it_is_the_likelihood_of_the_order(g):
    rewards = torch.randperm(g.logp.shape[1], generator=g.generator).to(torch.float64)
    u = (g.logp - g.anchor_logp)[0] / g.tau
    order = rewards.argsort(descending=True).tolist()
    for ties in ("efron", "breslow"):
        loss = adpo.Objective(adpo.plackett_luce(ties), tau=g.tau).loss(
            g.logp, g.anchor_logp, rewards=rewards[None]
        )
        close(loss, order_nll(u, order))


@given(rewards=st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_efron_at_the_anchor_is_the_average_over_all_orders(rewards):
    zero = torch.zeros(len(rewards), dtype=torch.float64, requires_grad=True)
    orders = list(orders_of(rewards))
    average = sum(order_nll(zero, order) for order in orders) / len(orders)
    (expected,) = torch.autograd.grad(average, zero)
    table = torch.tensor([rewards], dtype=torch.float64)
    close(
        adpo.Objective(adpo.plackett_luce()).coefficients(torch.zeros_like(table), None, rewards=table)[0],
        expected,
    )


@given(rewards=st.lists(st.integers(0, 3), min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_efron_and_breslow_are_the_partial_likelihoods_of_cox_regression(rewards, seed):
    u = torch.randn(len(rewards), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    table, reward = u[None], torch.tensor(rewards, dtype=torch.float64)
    breslow, efron, constant = 0.0, 0.0, 0.0
    for level in sorted(set(rewards))[1:]:
        stratum, at_risk = u[reward == level], u[reward <= level]
        d = len(stratum)
        breslow += d * at_risk.exp().sum().log() - stratum.sum()
        for turn in range(d):
            efron += (at_risk.exp().sum() - turn / d * stratum.exp().sum()).log()
            constant -= math.log(1 - turn / d)
        efron -= stratum.sum()
    for ties, expected in {"breslow": breslow, "efron": efron + constant}.items():
        loss = adpo.Objective(adpo.plackett_luce(ties)).loss(table, None, rewards=reward[None])
        assert loss.item() == pytest.approx(float(expected), abs=1e-10)


@given(rewards=st.lists(st.integers(0, 1), min_size=1, max_size=9), tau=st.sampled_from([0.3, 1.0, 4.0]))
def test_breslow_with_binary_rewards_is_the_centred_reward(rewards, tau):
    table = torch.tensor([rewards], dtype=torch.float64)
    c = adpo.Objective(adpo.plackett_luce("breslow"), tau=tau).coefficients(
        torch.zeros_like(table), None, rewards=table
    )
    close(-tau * c, table - table.mean())


@pytest.mark.parametrize("k", [2, 3, 8, 40])
def test_at_the_anchor_the_coefficients_are_savage_scores(k):
    rewards = torch.arange(k, 0, -1, dtype=torch.float64)[None]  # rank 1 first
    c = adpo.Objective(adpo.plackett_luce(), tau=0.7).coefficients(
        torch.zeros_like(rewards), None, rewards=rewards
    )

    def harmonic(n):
        return sum(1 / i for i in range(1, n + 1))

    expected = [-(1 - (harmonic(k) - harmonic(k - rank))) / 0.7 for rank in range(1, k + 1)]
    close(c[0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("divergence", [adpo.cross_entropy, adpo.forward_kl], ids=str)
@given(g=groups())
def test_the_closed_form_equals_the_sum_over_stages(ties, smoothing, divergence, g):
    target = adpo.plackett_luce(ties, label_smoothing=smoothing)
    _, checked = prepare(g.logp, g.anchor_logp, g.tau, {"mask": g.mask, "rewards": g.rewards})
    leaf = torch.where(g.mask, g.logp, 0.0).requires_grad_()
    fast = target.compare(divergence, leaf, checked, None)
    slow = target.compare_stages(divergence, leaf, checked, None)
    close(fast, slow)
    close(*(torch.autograd.grad(total.sum(), leaf, retain_graph=True)[0] for total in (fast, slow)))
    for ours, theirs in zip(target.entropy(checked), Target.entropy(target, checked), strict=True):
        close(ours.double(), theirs.double())


def test_the_closed_form_is_what_runs(monkeypatch):
    """Long lists must not go stage by stage."""

    def stages(*_):
        raise AssertionError("went stage by stage")

    monkeypatch.setattr(adpo.plackett_luce, "stages", stages)
    rewards = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    for divergence in (adpo.cross_entropy, adpo.forward_kl):
        objective = adpo.Objective(adpo.plackett_luce(label_smoothing=0.1), divergence)
        objective.loss(rewards, None, rewards=rewards)
        objective.diagnostics(rewards, None, rewards=rewards)
    with pytest.raises(AssertionError, match="stage by stage"):
        adpo.Objective(adpo.plackett_luce(), adpo.wasserstein()).loss(rewards, None, rewards=rewards)


def test_the_closed_form_is_chosen_by_what_target_and_divergence_say_of_themselves(monkeypatch):
    """Not by which formula it is: a divergence of one's own has it, a formula that says nothing goes without."""
    rewards = torch.tensor([[3.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    own = adpo.Divergence("own", lambda *_: torch.full((1,), torch.nan), entropies=2)
    silent = adpo.Divergence("silent", adpo.cross_entropy.formula)
    target = adpo.plackett_luce()

    def loss(divergence):
        return adpo.Objective(target, divergence).loss(rewards, None, rewards=rewards)

    close(loss(own), 2 * loss(adpo.forward_kl) - loss(adpo.cross_entropy))
    close(loss(silent), loss(adpo.cross_entropy), 1e-6)
    monkeypatch.setattr(adpo.plackett_luce, "cross_entropy", Target.cross_entropy)
    assert loss(own).isnan()  # stage by stage, by its formula


def test_a_strict_ranking_of_k_has_k_minus_one_stages():
    rewards = torch.tensor([[3.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    _, checked = prepare(rewards, None, 1.0, {"rewards": rewards})
    stages = [stage for stage in adpo.plackett_luce().stages(checked) if stage.support().any()]
    assert [stage.support().sum().item() for stage in stages] == [4, 3, 2]
    assert [stage.log_q.exp()[0].argmax().item() for stage in stages] == [0, 2, 1]


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("levels", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_accurate_for_long_lists_and_huge_logits(ties, levels, dtype):
    """K = 4096, |u| about 1e4, against a direct float64 sum over every stage."""
    k, generator = 4096, torch.Generator().manual_seed(3)
    logp = (1e4 * torch.randn(1, k, generator=generator, dtype=torch.float64)).to(dtype)
    rewards = torch.rand(1, k, generator=generator, dtype=torch.float64)
    if levels:
        rewards = (levels * rewards).floor()
    c = adpo.Objective(adpo.plackett_luce(ties)).coefficients(logp, None, rewards=rewards)[0]
    u, r = logp[0].double().numpy(), rewards[0].numpy()
    expected = np.zeros(k)
    for level in np.unique(r)[1:]:
        stratum, at_risk = r == level, r <= level
        d = int(stratum.sum())
        for turn in range(d):
            weight = np.where(stratum, 1 - turn / d if ties == "efron" else 1.0, 1.0) * at_risk
            with np.errstate(divide="ignore"):
                shifted = np.where(weight > 0, u + np.log(weight), -np.inf)
            p = np.exp(shifted - shifted.max())
            expected += p / p.sum() - stratum / d
    error = np.abs(c.double().numpy() - expected) / (1 + np.abs(expected))
    assert error.max() < 1e-4


def test_coefficients_can_reach_k_minus_one_over_tau_but_not_more():
    k, tau = 6, 0.5
    rewards = torch.arange(k, dtype=torch.float64)[None]
    logp = torch.zeros(1, k, dtype=torch.float64)
    logp[0, 0] = 100.0  # the worst candidate is by far the most likely: it loses every stage
    c = adpo.Objective(adpo.plackett_luce(), tau=tau).coefficients(logp, None, rewards=rewards)
    assert c[0, 0].item() == pytest.approx((k - 1) / tau, rel=1e-6)


@given(g=groups(ragged=False, min_k=2))
def test_ranking_forces_are_bounded(g):
    c = adpo.Objective(adpo.plackett_luce(), tau=g.tau).coefficients(
        g.logp, g.anchor_logp, rewards=g.rewards, reduction="sum"
    )
    assert torch.all(c.abs() <= (g.logp.shape[1] - 1) / g.tau + 1e-9)


@given(g=groups(min_k=2, max_groups=1, ragged=False))
def test_the_hessian_is_the_sum_of_the_stage_covariances(g):
    rewards = torch.randperm(g.logp.shape[1], generator=g.generator).to(torch.float64)
    objective = adpo.Objective(adpo.plackett_luce(), tau=g.tau)
    hessian = torch.autograd.functional.hessian(
        lambda x: objective.loss(x[None], g.anchor_logp, rewards=rewards[None]), g.logp[0]
    )
    u = (g.logp - g.anchor_logp)[0] / g.tau
    order = rewards.argsort(descending=True)
    expected = torch.zeros_like(hessian)
    for place in range(len(order) - 1):
        inside = torch.zeros_like(u, dtype=torch.bool)
        inside[order[place:]] = True
        p = torch.softmax(torch.where(inside, u, -torch.inf), 0)
        expected += (torch.diag(p) - torch.outer(p, p)) / g.tau**2
    close(hessian, expected, 1e-8)


def test_curvature_and_loss_vanish_as_the_margin_grows():
    """A strict ranking has no finite minimiser: the loss falls for ever, and flattens."""
    rewards = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    objective = adpo.Objective(adpo.plackett_luce())

    def at(margin):
        point = (rewards * margin).squeeze(0)
        hessian = torch.autograd.functional.hessian(
            lambda x: objective.loss(x[None], None, rewards=rewards), point
        )
        return objective.loss(point[None], None, rewards=rewards).item(), hessian.abs().max().item()

    (loss0, curve0), (loss1, curve1), (loss2, curve2) = at(1.0), at(10.0), at(30.0)
    assert loss0 > loss1 > loss2 > 0
    assert curve0 > 0.1 > curve1 > curve2
    assert curve2 < 1e-12


def test_label_smoothing_gives_a_ranking_a_finite_minimiser():
    rewards = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    objective = adpo.Objective(adpo.plackett_luce(label_smoothing=0.2))
    logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = objective.loss(logits, None, rewards=rewards)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert objective.coefficients(logits, None, rewards=rewards).abs().max() < 1e-6
    assert logits.abs().max() < 10
