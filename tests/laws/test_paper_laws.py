"""What the paper says (or should have said) about the equation, each as a test.

Where a candidate set is the full support of the policy, ``logp`` may be any logits: a shift of a group changes
nothing.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adpo
from adpo.baselines import kl_regularized_loss, mpo_loss
from adpo.core.groups import prepare
from draws import groups


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def minimise(objective, anchor_logp, **signals):
    """The policy over the full support that minimises the objective, by Newton-like descent on its logits."""
    logits = torch.zeros_like(anchor_logp).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=500, tolerance_grad=1e-13, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = objective.loss(torch.log_softmax(logits, 1), anchor_logp, reduction="sum", **signals)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return torch.softmax(logits.detach(), 1)


def normalised(weights):
    return weights / weights.sum(1, keepdim=True)


seeds = st.integers(0, 10_000)
taus = st.sampled_from([0.4, 1.0, 2.0])


@settings(max_examples=15)
@given(seed=seeds, tau=taus)
def test_the_closed_form_optimum(seed, tau):
    """pi* = anchor * q^tau / Z."""
    anchor, q = torch.log_softmax(random(3, 5, seed=seed), 1), torch.softmax(random(3, 5, seed=seed + 1), 1)
    best = minimise(adpo.Objective(adpo.targets.soft(), tau=tau), anchor, q=q)
    close(best, normalised(anchor.exp() * q**tau), 1e-5)


@settings(max_examples=15)
@given(seed=seeds, tau=taus, b=st.sampled_from([0.5, 1.0, 2.0]))
def test_beta_equal_to_b_tau_reaches_the_optimum_of_kl_regularised_rl(seed, tau, b):
    """pi* = anchor * exp(R/b) for every tau if beta = b * tau: the real knob is beta / tau."""
    anchor, rewards = torch.log_softmax(random(3, 4, seed=seed), 1), random(3, 4, seed=seed + 1)
    best = minimise(adpo.Objective(adpo.boltzmann(b * tau), tau=tau), anchor, rewards=rewards)
    close(best, normalised(anchor.exp() * (rewards / b).exp()), 1e-5)


def test_with_beta_b_alone_the_optimum_depends_on_tau():
    anchor, rewards = torch.log_softmax(random(1, 4), 1), random(1, 4, seed=1)
    at = [minimise(adpo.Objective(adpo.boltzmann(1.0), tau=tau), anchor, rewards=rewards) for tau in (0.5, 1.0)]
    close(at[1], normalised(anchor.exp() * rewards.exp()), 1e-5)
    assert (at[0] - at[1]).abs().max() > 0.01


def test_with_beta_equal_to_tau_the_optimum_forgets_tau():
    """q = exp(R/tau)/Z, as the paper has it in one place: anchor * exp(R)/Z for every tau."""
    anchor, rewards = torch.log_softmax(random(1, 4), 1), random(1, 4, seed=1)
    for tau in (0.5, 1.0, 2.0):
        best = minimise(adpo.Objective(adpo.boltzmann(tau), tau=tau), anchor, rewards=rewards)
        close(best, normalised(anchor.exp() * rewards.exp()), 1e-5)


def test_the_printed_gradient_of_reverse_adpo_has_the_other_sign():
    """Of KL(pi || ref exp(R/b)/Z): E_pi[(l - l_ref - R/b) grad l]; what is printed is minus that, at tau = 1."""
    logits, ref, rewards, b = random(2, 5), torch.log_softmax(random(2, 5, seed=1), 1), random(2, 5, seed=2), 0.7
    logits.requires_grad_()
    logp = torch.log_softmax(logits, 1)
    kl = adpo.Objective(adpo.targets.teacher(), adpo.reverse_kl).loss(
        logp, None, teacher_logp=ref + rewards / b, reduction="sum"
    )
    (true,) = torch.autograd.grad(kl, logits, retain_graph=True)
    printed = (logp.detach().exp() * (rewards / b - (logp.detach() - ref)) * logp).sum()
    (found,) = torch.autograd.grad(printed, logits)
    close(found, -true, 1e-8)


def test_small_tau_means_an_optimum_near_the_anchor_and_a_large_first_step():
    anchor, rewards = torch.log_softmax(random(1, 4), 1), random(1, 4, seed=1)
    distance, force = [], []
    for tau in (0.2, 1.0, 3.0):
        objective = adpo.Objective(adpo.boltzmann(1.0), tau=tau)
        best = minimise(objective, anchor, rewards=rewards)
        distance.append((best * (best.log() - anchor)).sum().item())
        force.append(objective.coefficients(anchor, anchor, rewards=rewards).abs().max().item())
    assert distance == sorted(distance)
    assert force == sorted(force, reverse=True)


@given(g=groups(ragged=False))
def test_at_the_anchor_the_coefficients_are_known_before_any_forward(g):
    """(1/K - q_i)/tau, times 1/groups for the mean."""
    k = g.logp.shape[1]
    c = adpo.Objective(adpo.targets.soft(), tau=g.tau).coefficients(g.logp, g.logp, q=g.q)
    close(c, (1 / k - g.q) / g.tau / len(g.q))


@given(g=groups())
def test_one_stage_forces_are_bounded_by_one_over_tau(g):
    for target in (adpo.targets.soft(), adpo.boltzmann(0.1), adpo.top1()):
        c = adpo.Objective(target).coefficients(g.logp, g.anchor_logp, reduction="sum", **g.arguments())
        assert torch.all(c.abs() <= 1 / g.tau + 1e-12)


@given(g=groups(min_k=2, max_groups=1, ragged=False))
def test_the_hessian_is_the_fisher_matrix_over_tau_squared(g):
    """(Diag(p) - p p^T)/tau^2 in log-prob space; at the optimum p = q."""
    objective = adpo.Objective(adpo.targets.soft(), tau=g.tau)

    def hessian(logp):
        return torch.autograd.functional.hessian(lambda x: objective.loss(x[None], g.anchor_logp, q=g.q), logp)

    def fisher(p):
        return (torch.diag(p) - torch.outer(p, p)) / g.tau**2

    close(hessian(g.logp[0]), fisher(torch.softmax((g.logp - g.anchor_logp)[0] / g.tau, 0)), 1e-8)
    # The bowl's centre is anchor + tau log q, not the anchor.
    centre = (g.anchor_logp + g.tau * g.q.log())[0]
    close(objective.coefficients(centre[None], g.anchor_logp, q=g.q), torch.zeros_like(g.q))
    close(hessian(centre), fisher(g.q[0]), 1e-8)


@given(g=groups(ragged=False))
def test_forward_kl_is_a_bregman_divergence(g):
    """KL(q || softmax(u)) = A(u) - A(u*) - <grad A(u*), u - u*>, A = logsumexp, softmax(u*) = q."""
    u, best = (g.logp - g.anchor_logp) / g.tau, g.q.log()
    bregman = torch.logsumexp(u, 1) - torch.logsumexp(best, 1) - (g.q * (u - best)).sum(1)
    loss = adpo.Objective(adpo.targets.soft(), adpo.forward_kl, g.tau).loss(
        g.logp, g.anchor_logp, q=g.q, reduction="none"
    )
    close(loss, bregman)


@given(g=groups(min_k=2, ragged=False))
def test_forward_kl_is_locally_the_fisher_quadratic_form(g):
    """KL = (1/2 tau^2) d^T (Diag(q) - q q^T) d + o(d^2) around the centre, with d in log-prob space."""
    centre = g.anchor_logp + g.tau * g.q.log()
    step = 1e-3 * g.tau * torch.randn(centre.shape, generator=g.generator, dtype=torch.float64)
    loss = adpo.Objective(adpo.targets.soft(), adpo.forward_kl, g.tau).loss(
        centre + step, g.anchor_logp, q=g.q, reduction="none"
    )
    mean = (g.q * step).sum(1)
    quadratic = ((g.q * step**2).sum(1) - mean**2) / (2 * g.tau**2)
    torch.testing.assert_close(loss, quadratic, rtol=2e-2, atol=1e-12)


@given(g=groups())
def test_cross_entropy_is_forward_kl_plus_the_targets_entropy(g):
    for target in (adpo.targets.soft(), adpo.boltzmann(0.5), adpo.kde(), adpo.plackett_luce(), adpo.top1()):
        ce, kl = (
            adpo.Objective(target, divergence).loss(g.logp, g.anchor_logp, reduction="none", **g.arguments())
            for divergence in (adpo.cross_entropy, adpo.forward_kl)
        )
        assert torch.all(kl >= -1e-12)
        _, checked = prepare(g.logp, g.anchor_logp, g.tau, {"mask": g.mask, "rewards": g.rewards, "q": g.q})
        close(ce - kl, target.entropy(checked)[0])
        grads = [
            adpo.Objective(target, divergence).coefficients(g.logp, g.anchor_logp, **g.arguments())
            for divergence in (adpo.cross_entropy, adpo.forward_kl)
        ]
        close(*grads)


@given(g=groups(ragged=False))
def test_the_corrected_gradient_of_reverse_adpo(g):
    """dL/dlogp_j = p_j [(u_j - log q_j) - E_p(u - log q)] / tau."""
    u = (g.logp - g.anchor_logp) / g.tau
    p = torch.softmax(u, 1)
    log_q = torch.log_softmax(g.rewards / 0.6, 1)
    gap = u - log_q
    expected = p * (gap - (p * gap).sum(1, keepdim=True)) / g.tau
    objective = adpo.presets.reverse_adpo(beta=0.6, tau=g.tau)
    close(objective.coefficients(g.logp, g.anchor_logp, rewards=g.rewards, reduction="sum"), expected, 1e-8)


@given(g=groups(ragged=False), b=st.sampled_from([0.3, 1.0, 2.0]))
def test_reverse_kl_to_the_rl_optimum_is_kl_regularised_rl(g, b):
    """In absolute coordinates, KL(pi || ref exp(R/b)/Z) = (1/b)(b KL(pi || ref) - E_pi R) + log Z."""
    logits = g.logp.clone().requires_grad_()
    objective = adpo.Objective(adpo.targets.teacher(), adpo.reverse_kl)
    ref = torch.log_softmax(g.anchor_logp, 1)
    ours = objective.loss(torch.log_softmax(logits, 1), None, teacher_logp=ref + g.rewards / b)
    theirs = kl_regularized_loss(logits, ref, g.rewards, b) / b
    log_z = torch.logsumexp(ref + g.rewards / b, 1).mean()
    close(ours, theirs + log_z, 1e-8)
    close(torch.autograd.grad(ours, logits)[0], torch.autograd.grad(theirs, logits)[0], 1e-8)


@given(g=groups(ragged=False), beta=st.sampled_from([0.5, 1.0, 2.0]))
def test_with_the_zero_anchor_the_boltzmann_target_is_the_m_projection(g, beta):
    """Cross-entropy with q = softmax(A/beta) is MPO's weighted likelihood, where candidates are the support."""
    logits = g.logp.clone().requires_grad_()
    logp = torch.log_softmax(logits, 1)
    ours = adpo.Objective(adpo.boltzmann(beta)).loss(logp, None, rewards=g.rewards)
    theirs = mpo_loss(logp, g.rewards, beta)
    close(ours, theirs)
    close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)))


@settings(max_examples=10)
@given(seed=seeds, beta=st.sampled_from([0.5, 1.0]))
def test_with_the_prior_inside_the_target_it_counts_twice(seed, beta):
    """q = old exp(A/beta)/Z and tau = beta: ADPO reaches old^(1+beta) exp(A), AWR old exp(A/beta)."""
    old, advantage = torch.log_softmax(random(2, 4, seed=seed), 1), random(2, 4, seed=seed + 1)
    best = minimise(adpo.Objective(adpo.boltzmann(beta, reference=True), tau=beta), old, rewards=advantage)
    close(best, normalised(((1 + beta) * old + advantage).exp()), 1e-5)
    awr = minimise(adpo.Objective(adpo.boltzmann(beta), tau=1.0), old, rewards=advantage)
    close(awr, normalised((old + advantage / beta).exp()), 1e-5)


@settings(max_examples=15)
@given(seed=seeds, tau=taus)
def test_the_anchored_teacher_is_reached_from_every_anchor(seed, tau):
    anchor, teacher = (torch.log_softmax(random(2, 5, seed=seed + i), 1) for i in (0, 1))
    best = minimise(adpo.Objective(adpo.targets.teacher(anchored=True), tau=tau), anchor, teacher_logp=teacher)
    close(best, teacher.exp(), 1e-5)
    biased = minimise(adpo.Objective(adpo.targets.teacher(), tau=tau), anchor, teacher_logp=teacher)
    close(biased, normalised(anchor.exp() * teacher.exp() ** tau), 1e-5)


def test_without_an_anchor_nothing_holds_a_student_back():
    """However far the teacher is; an anchor with tau 0.4 keeps the student between the two."""
    teacher = torch.log_softmax(4 * random(2, 5), 1)
    even = torch.log_softmax(torch.zeros_like(teacher), 1)
    alone = minimise(adpo.presets.kd(), torch.zeros_like(teacher), teacher_logp=teacher)
    close(alone, teacher.exp(), 1e-5)
    held = minimise(adpo.Objective(adpo.targets.teacher(), tau=0.4), even, teacher_logp=teacher)
    assert torch.all((held * (held.log() - even)).sum(1) < 0.7 * (alone * (alone.log() - even)).sum(1))


@settings(max_examples=10)
@given(seed=seeds, tau=taus)
def test_a_dynamic_anchor_is_multiplicative_weights(seed, tau):
    """Anchoring to each optimum in turn: pi_k = pi_0 q^(k tau) / Z, sharper for ever."""
    anchor, q = torch.log_softmax(random(2, 4, seed=seed), 1), torch.softmax(random(2, 4, seed=seed + 1), 1)
    policy = anchor
    for _ in range(3):
        policy = minimise(adpo.Objective(adpo.targets.soft(), tau=tau), policy, q=q).log()
    close(policy.exp(), normalised(anchor.exp() * q ** (3 * tau)), 1e-4)


def test_at_the_anchor_tau_only_scales_the_step():
    rewards = random(2, 4)
    first, second = random(2, 4, seed=1), random(2, 4, seed=2)
    c = [
        adpo.Objective(adpo.boltzmann(1.0), tau=tau).coefficients(first, first, rewards=rewards)
        for tau in (1.0, 0.1)
    ]
    close(c[1], 10 * c[0])
    close(adpo.Objective(adpo.boltzmann(1.0)).coefficients(second, second, rewards=rewards), c[0])


def test_the_common_mass_of_a_group_is_free():
    """Likelihood displacement: all log-probs may fall together, the loss does not move; diagnostics show it."""
    logp, anchor, rewards = random(2, 4), random(2, 4, seed=1), random(2, 4, seed=2)
    objective = adpo.Objective(adpo.plackett_luce())
    close(objective.loss(logp - 30, anchor, rewards=rewards), objective.loss(logp, anchor, rewards=rewards))
    before, after = (objective.diagnostics(x, anchor, rewards=rewards) for x in (logp, logp - 30))
    close(after.log_ratio, before.log_ratio - 30)
    close(after.anchor_kl, before.anchor_kl)


@pytest.mark.parametrize(
    "divergence", [adpo.reverse_kl, adpo.divergences.alpha(0), adpo.divergences.alpha(-1.0)], ids=str
)
@pytest.mark.parametrize("target", [adpo.one_hot, adpo.top1, adpo.bradley_terry, adpo.plackett_luce])
def test_infinite_pairs_are_refused_and_smoothing_cures(target, divergence):
    with pytest.raises(ValueError, match="label_smoothing"):
        adpo.Objective(target(), divergence)
    adpo.Objective(target(label_smoothing=0.1), divergence)


def test_a_soft_target_with_a_zero_is_refused_when_it_comes():
    objective = adpo.Objective(adpo.targets.soft(), adpo.reverse_kl)
    with pytest.raises(ValueError, match=r"group 0, candidate 1.*label_smoothing"):
        objective.loss(torch.zeros(1, 2), None, q=torch.tensor([[1.0, 0.0]]))


@given(g=groups(min_k=2, max_k=2, ragged=False), b=st.sampled_from([0.1, 1.0, 3.0]))
def test_soft_pairs_are_softplus_minus_q(g, b):
    """softplus(b D) - q b D."""
    preference = torch.rand(len(g.logp), generator=g.generator, dtype=torch.float64)
    difference = (g.logp - g.anchor_logp)[:, 0] - (g.logp - g.anchor_logp)[:, 1]
    expected = torch.nn.functional.softplus(b * difference) - preference * b * difference
    loss = adpo.presets.soft_dpo(b).loss(g.logp, g.anchor_logp, preference=preference, reduction="none")
    close(loss, expected)


def test_the_anchor_is_a_constant():
    logp, anchor = random(1, 3).requires_grad_(), random(1, 3, seed=1).requires_grad_()
    adpo.Objective(adpo.boltzmann(1.0)).loss(logp, anchor, rewards=random(1, 3, seed=2)).backward()
    assert anchor.grad is None
    assert logp.grad is not None
    u = adpo.anchored_logits(logp, anchor, 0.5)
    u.sum().backward()
    assert anchor.grad is None


def test_breaking_ties_by_position_would_be_noise():
    """Why ties get strata: an arbitrary order of 8 equal rewards has coefficients of RMS 0.81."""
    rewards = torch.arange(8, dtype=torch.float64)[None]  # what argsort would make of a tie
    c = adpo.Objective(adpo.plackett_luce()).coefficients(
        torch.zeros(1, 8, dtype=torch.float64), None, rewards=rewards
    )
    assert c.square().mean().sqrt().item() == pytest.approx(0.81, abs=0.005)
