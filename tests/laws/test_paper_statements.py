"""Statements of the paper that need a proof, a limit or a correction; `docs/paper.md` has the words."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adpo
from adpo import baselines
from draws import OBJECTIVES, groups

ROOT = Path(__file__).parents[2]


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def force(divergence, deviation, tau=1.0):
    """What pulls the first of two candidates back that has moved by ``deviation`` nats from an even target."""
    logp = torch.tensor([[deviation, 0.0]], dtype=torch.float64)
    q = torch.full((1, 2), 0.5, dtype=torch.float64)
    return adpo.Objective(adpo.targets.soft(), divergence, tau).coefficients(logp, None, q=q)[0, 0].item()


@pytest.mark.parametrize("divergence", [adpo.forward_kl, adpo.reverse_kl], ids=str)
@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_the_restoring_force_is_linear_near_the_optimum_alone(divergence, tau):
    """There: Fisher matrix over tau^2, here 1/4. Far away forward KL pulls with 1/(2 tau), reverse KL with 0."""
    near = 1e-4 * tau
    assert force(divergence, near, tau) == pytest.approx(near / (4 * tau**2), rel=1e-4)
    assert force(divergence, 2 * near, tau) == pytest.approx(2 * force(divergence, near, tau), rel=1e-4)
    far = force(divergence, 40 * tau, tau)
    assert far == pytest.approx(0.5 / tau if divergence is adpo.forward_kl else 0, abs=1e-12)
    if divergence is adpo.reverse_kl:  # it has a peak, and what is beyond comes back more slowly the farther it is
        pulls = [force(divergence, d * tau, tau) for d in (0.5, 1, 2, 4, 8, 16)]
        assert max(pulls) == max(pulls[1:4]) > 10 * pulls[4] > 10 * pulls[5] > 0


def test_the_same_holds_of_the_printed_gradient():
    """E_pi[(l - l_ref) grad l]: each candidate's term carries its own probability, which fades as it falls."""
    ref = torch.log_softmax(torch.zeros(1, 4, dtype=torch.float64), 1)
    pulls = []
    for fallen in (1.0, 4.0, 16.0):
        logits = torch.tensor([[-fallen, 0.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
        logp = torch.log_softmax(logits, 1)
        (logp.exp() * (logp - ref)).sum().backward()
        pulls.append(-logits.grad[0, 0].item())
    assert pulls[0] > 0
    assert pulls[2] < 1e-4 * pulls[1]


@given(g=groups(min_k=2, ragged=False))
def test_a_strict_ranking_pulls_nothing_back(g):
    """At every u the best is pushed up and the worst down: no trust region has its centre anywhere."""
    rewards = torch.rand(g.logp.shape, generator=g.generator, dtype=torch.float64).argsort(1).double()
    objective = adpo.Objective(adpo.plackett_luce(), tau=g.tau)
    c = objective.coefficients(g.logp, g.anchor_logp, rewards=rewards)
    assert torch.all(c.gather(1, rewards.argmax(1, keepdim=True)) < 0)
    assert torch.all(c.gather(1, rewards.argmin(1, keepdim=True)) > 0)
    # Along the order itself the loss falls for ever, from any point.
    ahead = objective.loss(g.logp + rewards, g.anchor_logp, rewards=rewards)
    assert ahead < objective.loss(g.logp, g.anchor_logp, rewards=rewards)


def test_a_ranking_has_the_factor_one_over_tau_squared_all_the_same():
    """The Hessian as a function of u does have it; what it lacks is a minimum to be the curvature of."""
    rewards, u = random(1, 5), random(5, seed=1)

    def curvature(tau):
        objective = adpo.Objective(adpo.plackett_luce(), tau=tau)
        return torch.func.hessian(lambda logp: objective.loss(logp[None], None, rewards=rewards))(tau * u)

    close(curvature(0.3), curvature(1.0) / 0.3**2)


HACKABLE = torch.tensor([[1.0, 0.6, 0.45, 0.3, 0.15, 0.0, 0.0, 0.0]], dtype=torch.float64)
"""One answer is right; wrong ones are paid for their length."""


def test_a_ranking_pays_a_hack_like_a_second_best():
    """The longest wrong one is pushed up nearly as hard as the right one; a sharp Boltzmann target lowers it."""
    zero = torch.zeros(1, 8, dtype=torch.float64)
    ranking = -adpo.presets.anchored_ranking().coefficients(zero, None, rewards=HACKABLE)[0]
    boltzmann = -adpo.presets.listwise_raw(beta=0.1).coefficients(zero, None, rewards=HACKABLE)[0]
    assert ranking[1] > 0.8 * ranking[0] > 0
    assert ranking[2] > 0.6 * ranking[0]
    assert torch.all(boltzmann[1:] < 0)
    assert boltzmann[0] > 0.8


def test_a_ranking_cannot_see_that_a_hack_is_hardly_paid():
    """Scale-free: 0.6, or a thousandth of it, is the same order."""
    logp = random(1, 8)
    cheap = torch.where(HACKABLE < 1, HACKABLE / 1000, HACKABLE)
    for target in (adpo.plackett_luce(), adpo.plackett_luce("breslow")):
        objective = adpo.Objective(target)
        close(
            objective.coefficients(logp, None, rewards=cheap), objective.coefficients(logp, None, rewards=HACKABLE)
        )
    raw = adpo.presets.listwise_raw(beta=0.1)
    paid = [(1 / 8 - raw.coefficients(0 * logp, None, rewards=r))[0, 1].item() for r in (HACKABLE, cheap)]
    assert paid[1] < 0.1 * paid[0]


def test_with_a_reward_that_can_be_gamed_the_ranking_is_the_one_that_collapses():
    """The figures that docs/paper.md quotes are those of the table of results."""
    table = (ROOT / "docs/results/reasoning.md").read_text()
    page = (ROOT / "docs/paper.md").read_text()
    right = {
        target: re.search(rf"hackable reward, tau 0.1, target {target} \|(?: \d+ \|)+ ([\d.]+%) ±", table).group(1)
        for target in ("plackett_luce", "boltzmann", "top1", "kde")
    }
    assert (
        float(right["plackett_luce"].rstrip("%"))
        < 5
        < 60
        < min(float(right[other].rstrip("%")) for other in ("boltzmann", "top1", "kde"))
    )
    for figure in right.values():
        assert figure.replace("%", " %") in page


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_beta_is_a_temperature_and_not_its_inverse(seed):
    """Larger beta: closer to the reference, and a target of higher entropy. Its limits are reference and best."""
    ref, rewards = torch.log_softmax(random(1, 5, seed=seed), 1), random(1, 5, seed=seed + 1)

    def optimum(beta):
        return torch.log_softmax(ref + rewards / beta, 1)

    distances = [(optimum(beta).exp() * (optimum(beta) - ref)).sum().item() for beta in (0.3, 1.0, 3.0, 10.0)]
    assert distances == sorted(distances, reverse=True)
    close(optimum(1e9), ref, 1e-6)
    assert optimum(1e-4).exp()[0, rewards.argmax()] > 1 - 1e-6
    objectives = [adpo.Objective(adpo.boltzmann(beta)) for beta in (0.3, 1.0, 3.0, 10.0)]
    entropies = [o.diagnostics(ref, None, rewards=rewards).target_entropy.item() for o in objectives]
    assert entropies == sorted(entropies)


ONE_STAGE = {
    name: pair
    for name, pair in OBJECTIVES.items()
    if name.endswith(("/cross_entropy", "/forward_kl")) and "efron" not in name and "breslow" not in name
}


@pytest.mark.parametrize("name", ONE_STAGE)
@settings(max_examples=5)
@given(g=groups())
def test_everywhere_the_coefficients_are_p_minus_q_over_tau(name, g):
    """Of one stage under cross-entropy, at every u; groups whose stage is silent have none."""
    target, divergence = ONE_STAGE[name]
    objective = adpo.Objective(target, divergence)
    c = objective.coefficients(g.logp, g.anchor_logp, reduction="none", **g.arguments())
    u = torch.where(g.mask, (g.logp - g.anchor_logp) / g.tau, -torch.inf)
    p = torch.softmax(torch.where(g.real.unsqueeze(1), u, 0.0), 1)
    at_anchor = objective.coefficients(g.anchor_logp, g.anchor_logp, reduction="none", **g.arguments())
    even = g.mask.double() / g.mask.sum(1, keepdim=True).clamp(min=1)
    q = even - g.tau * at_anchor  # read off at u = 0
    silent = (at_anchor == 0).all(1) & (c == 0).all(1) | ~g.real
    close(c[~silent], ((p - q) / g.tau)[~silent], 1e-8)


def test_p_minus_q_is_not_what_other_divergences_and_rankings_have():
    logp, q = random(1, 4), torch.softmax(random(1, 4, seed=1), 1)
    p = torch.softmax(logp, 1)
    for divergence in (adpo.reverse_kl, adpo.divergences.alpha(0.5), adpo.wasserstein()):
        objective = adpo.Objective(adpo.targets.soft(), divergence)
        c = objective.coefficients(logp, None, q=q, positions=torch.arange(4)[None])
        assert (c - (p - q)).abs().max() > 0.01
    # A ranking has such a difference in every stage: its coefficients are their sum.
    rewards = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    total = sum(
        torch.cat([torch.zeros(1, k, dtype=torch.float64), torch.softmax(logp[:, k:], 1)], 1)
        - torch.nn.functional.one_hot(torch.tensor([k]), 4)
        for k in range(3)
    )
    close(adpo.presets.anchored_ranking().coefficients(logp, None, rewards=rewards), total)


def fisher(q):
    return torch.diag(q) - torch.outer(q, q)


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6))
def test_the_fisher_matrix_is_strictly_positive_off_the_ones_where_every_mass_is(weights):
    q = torch.tensor(weights, dtype=torch.float64)
    q = q / q.sum()
    values = torch.linalg.eigvalsh(fisher(q))
    assert abs(values[0]) < 1e-15  # along the ones
    assert values[1] > 0
    # Between its bounds: the least mass, and (q_i + q_j)/2 - (q_i - q_j)^2/2 of the two least.
    low = q.sort().values[:2]
    assert low[0] - 1e-12 <= values[1] <= (low.sum() - (low[1] - low[0]) ** 2) / 2 + 1e-12


@pytest.mark.parametrize("zeros", [1, 2, 3])
def test_a_target_with_zeros_has_flat_directions_and_no_point_to_expand_around(zeros):
    q = torch.tensor([0.0] * zeros + [0.7, 0.3], dtype=torch.float64)
    flat = (torch.linalg.eigvalsh(fisher(q)).abs() < 1e-12).sum()
    assert flat == zeros + 1
    objective = adpo.Objective(adpo.targets.soft(), adpo.forward_kl)
    losses = []
    for depth in (5.0, 10.0, 20.0):  # u* would be at minus infinity
        u = torch.where(q > 0, q.clamp(min=1e-9).log(), -depth)
        losses.append(objective.loss(u[None], None, q=q[None]).item())
    assert losses[0] > losses[1] > losses[2] > 0
    assert torch.linalg.eigvalsh(fisher(torch.tensor([1 - 1e-6, 1e-6], dtype=torch.float64)))[1] < 3e-6


def awr_gradient(logits, old, advantages, beta):
    """Of -E_old[exp(A/beta) log pi], over the full support: sum of w times (pi - q)."""
    weights = old.exp() * (advantages / beta).exp()
    z = weights.sum()
    return z, torch.softmax(logits, 0) - weights / z


def test_awac_is_the_limit_of_many_candidates_at_tau_one():
    """On-policy anchor, tau = 1, q = softmax(A/beta), no prior in it: as K grows the gradient is AWR's over Z."""
    beta, generator = 0.7, torch.Generator().manual_seed(0)
    old, advantages, logits = torch.log_softmax(random(5), 0), random(5, seed=1), random(5, seed=2)
    _, expected = awr_gradient(logits, old, advantages, beta)
    objective = adpo.presets.listwise_raw(beta=beta, tau=1.0)

    def mean_gradient(k, count):
        drawn = torch.multinomial(old.exp(), k * count, replacement=True, generator=generator).view(count, k)
        leaf = logits.clone().requires_grad_()
        logp = torch.log_softmax(leaf, 0)
        objective.loss(logp[drawn], old[drawn], rewards=advantages[drawn]).backward()
        return leaf.grad

    off = {k: (mean_gradient(k, 400_000 // k) - expected).abs().max().item() for k in (2, 8, 20_000)}
    assert off[20_000] < 0.01 < off[8] < off[2]


def test_awr_weighs_a_context_by_its_partition_function_and_adpo_does_not():
    """The same group with rewards 3 higher: AWR's gradient is exp(3/beta) times as large, ADPO's the same."""
    logp = torch.log_softmax(random(1, 4), 1).requires_grad_()
    advantages, beta = random(1, 4, seed=1), 1.0

    def gradients(shift):
        awr = baselines.awr_loss(logp, advantages + shift, beta, max_weight=1e9)
        ours = adpo.presets.listwise_raw(beta).loss(logp, logp.detach(), rewards=advantages + shift)
        return [torch.autograd.grad(loss, logp)[0] for loss in (awr, ours)]

    (awr, ours), (awr_up, ours_up) = gradients(0.0), gradients(3.0)
    close(awr_up, math.exp(3) * awr)
    close(ours_up, ours)


def guard_after(rewards, entropy=0.0):
    guard = adpo.GuardedTau(0.5, 2.0)
    for reward in rewards:
        tau = guard.update(entropy=entropy, reward=reward)
    return tau


def test_the_circuit_breaker_cannot_tell_wrong_from_right():
    """Confident and all wrong, confident and all right: the reward stands still, and tau is the same."""
    assert guard_after([0.0] * 20) == guard_after([1.0] * 20) == 2.0


def test_a_group_that_is_confidently_wrong_has_nothing_to_unlearn_by():
    """Its rewards are equal: at the anchor there is no gradient at any tau."""
    logp = random(1, 6)
    for preset in (adpo.presets.adpo, adpo.presets.anchored_ranking, adpo.presets.anchored_top1):
        for tau in (0.5, 2.0):
            c = preset(tau=tau).coefficients(logp, logp, rewards=torch.zeros(1, 6))
            assert c.abs().max() < 1e-15
            assert not preset(tau=tau).live(c, tau).any()


def test_a_large_tau_pulls_back_less():
    """Away from the anchor, towards which a tied group of a Boltzmann target pulls: tau_max is the weaker end."""
    anchor = torch.zeros(1, 4, dtype=torch.float64)
    moved = anchor + torch.tensor([[1.5, 0.0, 0.0, 0.0]], dtype=torch.float64)
    pulls = [
        adpo.presets.adpo(tau=tau).coefficients(moved, anchor, rewards=torch.zeros(1, 4))[0, 0].item()
        for tau in (0.5, 1.0, 2.0)
    ]
    assert pulls == sorted(pulls, reverse=True)
    assert pulls[2] > 0


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=4)
@given(g=groups(), height=st.floats(-50, 0))
def test_a_uniform_anchor_is_none(name, g, height):
    """Any anchor that is the same for all candidates of a group shifts u, and softmax does not see it."""
    objective = adpo.Objective(*OBJECTIVES[name])
    uniform = torch.full_like(g.logp, height) + torch.arange(len(g.logp)).unsqueeze(1)
    for what in (objective.loss, objective.coefficients):
        close(what(g.logp, uniform, **g.arguments()), what(g.logp, None, **g.arguments()), 1e-7)


def test_uniform_over_tokens_is_an_anchor():
    """A completion of n tokens has n log(1/V) under it: what is uniform over tokens pays for length."""
    lengths, rewards, logp = torch.tensor([[3.0, 9.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[-10.0, -10.0]])
    over_tokens = -lengths * math.log(50)
    assert adpo.presets.adpo().coefficients(logp, None, rewards=rewards)[0, 1] == 0
    assert adpo.presets.adpo().coefficients(logp, over_tokens, rewards=rewards)[0, 1] > 0.4
