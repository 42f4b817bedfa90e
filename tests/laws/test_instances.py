"""Which methods are settings of the equation, and which are not: the law that each of the others breaks.

Every setting's coefficients sum to zero in a group, and depend on ratios inside it alone.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adpo
from adpo import baselines
from adpo.baselines.grpo import group_advantages

ROOT = Path(__file__).parents[2]


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


LOGP, OLD, REWARDS = random(3, 4), random(3, 4, seed=1), random(3, 4, seed=2)
ADVANTAGES = group_advantages(REWARDS)
MASK = torch.ones(12, 1, dtype=torch.bool)


def tokens(loss):
    """Completions of one token each: the token's log-probability is the completion's."""
    return lambda logp: loss(logp.reshape(12, 1), OLD.reshape(12, 1), ADVANTAGES.reshape(12))


OTHERS = {  # group losses whose coefficients do not sum to zero
    "awr_loss": lambda x: baselines.awr_loss(x, ADVANTAGES),
    "mpo_loss": lambda x: baselines.mpo_loss(x, ADVANTAGES),
    "raft_loss": lambda x: baselines.raft_loss(x, REWARDS),
    "ppo_clip_loss": lambda x: baselines.ppo_clip_loss(x, OLD, ADVANTAGES),
    "grpo_loss": tokens(lambda *x: baselines.grpo_loss(*x, MASK)),
    "dr_grpo_loss": tokens(lambda *x: baselines.dr_grpo_loss(*x, MASK, 1)),
    "gspo_loss": tokens(lambda *x: baselines.gspo_loss(*x, MASK)),
    "gspo_token_loss": tokens(lambda *x: baselines.gspo_token_loss(*x, MASK)),
    "kto_loss": lambda x: baselines.kto_loss(x, OLD, REWARDS > 0, 0.0),
    "kl_penalty_loss": lambda x: baselines.kl_penalty_loss(x, OLD, ADVANTAGES, OLD, OLD),
    "cpo_loss": lambda x: baselines.cpo_loss(x[:, 0], x[:, 1]),
    "slic_loss": lambda x: baselines.slic_loss(x[:, 0], x[:, 1]),
}
INSTANCES = {  # each with the file of the test that compares value and gradient
    "sft_loss": "tests/test_presets.py",
    "kd_loss": "tests/test_presets.py",
    "dpo_loss": "tests/test_presets.py",
    "soft_dpo_loss": "tests/test_presets.py",
    "kl_regularized_loss": "tests/laws/test_paper_laws.py",
    "simpo_loss": "tests/laws/test_instances.py",
    "ipo_loss": "tests/laws/test_instances.py",
}
NO_LOSSES = {"trpo_step", "group_advantages"}


def test_every_baseline_is_classed():
    assert set(OTHERS) | set(INSTANCES) | NO_LOSSES == set(baselines.__all__)
    for name, file in INSTANCES.items():
        assert f"{name}(" in (ROOT / file).read_text()
    page = (ROOT / "docs/paper.md").read_text()
    assert all(f"`{name}`" in page for name in (*OTHERS, *INSTANCES, "trpo_step"))


def slope(loss):
    leaf = LOGP.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf), leaf)
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_coefficients_of_the_others_do_not_sum_to_zero(name):
    c = slope(OTHERS[name])
    assert (c.sum(1).abs() > 1e-3 * c.abs().sum(1)).any()
    assert c.any()


def test_policy_gradients_have_that_sum_on_policy_and_lose_it_with_the_first_step():
    """At the old policy c is -A/K, and advantages are centred; a step later each ratio weighs its own."""
    for name in ("ppo_clip_loss", "grpo_loss", "dr_grpo_loss", "gspo_loss"):
        leaf = OLD.clone().requires_grad_()
        (c,) = torch.autograd.grad(OTHERS[name](leaf), leaf)
        assert torch.all(c.sum(1).abs() < 1e-12)
        close(c, -ADVANTAGES / 12)


def test_on_the_full_support_the_m_projection_is_an_instance():
    """Where candidates are all actions, log-probabilities are normalised, and the sum goes with the softmax."""
    logits = LOGP.clone().requires_grad_()
    logp = torch.log_softmax(logits, 1)
    ours = adpo.presets.listwise_raw().loss(logp, None, rewards=ADVANTAGES)
    close(
        *(
            torch.autograd.grad(x, logits, retain_graph=True)[0]
            for x in (ours, baselines.mpo_loss(logp, ADVANTAGES))
        )
    )


@given(seed=st.integers(0, 1000), beta=st.sampled_from([0.5, 2.0]), gamma=st.sampled_from([0.0, 1.0]))
def test_simpo_is_a_pair_whose_anchor_is_the_margin(seed, beta, gamma):
    """u = beta (mean log-prob) - gamma for the winner: an anchor of gamma/beta, tau = 1/beta."""
    mean_logp = random(4, 2, seed=seed).requires_grad_()
    theirs = baselines.simpo_loss(mean_logp[:, 0], mean_logp[:, 1], beta, gamma)
    margin = torch.tensor([gamma / beta, 0.0], dtype=torch.float64).expand(4, 2)
    ours = adpo.presets.dpo(beta).loss(mean_logp, margin, rewards=torch.tensor([[1.0, 0.0]]).expand(4, 2))
    close(ours, theirs)
    close(*(torch.autograd.grad(x, mean_logp, retain_graph=True)[0] for x in (ours, theirs)))


def test_cpo_and_slic_without_their_likelihood_depend_on_the_margin_alone():
    for loss in (
        lambda x: baselines.cpo_loss(x[:, 0], x[:, 1], nll_weight=0),
        lambda x: baselines.slic_loss(x[:, 0], x[:, 1], nll_weight=0),
    ):
        c = slope(loss)
        assert c.any()
        assert torch.all(c.sum(1).abs() < 1e-12)


def test_ipo_takes_a_divergence_of_its_own():
    """A square of the margin, which is a function of p: none of the divergences here, whose force is bounded."""
    beta = 0.3

    def square(log_q, log_p, support, positions):
        return (log_p[:, 0] - log_p[:, 1] - 1 / (2 * beta)) ** 2

    own = adpo.Objective(adpo.bradley_terry(label_smoothing=0.1), adpo.Divergence("ipo", square))
    leaf = random(5, 2).requires_grad_()
    anchor, rewards = random(5, 2, seed=1), torch.tensor([[1.0, 0.0]]).expand(5, 2)
    theirs = baselines.ipo_loss(leaf[:, 0], leaf[:, 1], anchor[:, 0], anchor[:, 1], beta)
    close(own.loss(leaf, anchor, rewards=rewards), theirs)
    close(own.coefficients(leaf, anchor, rewards=rewards), torch.autograd.grad(theirs, leaf)[0])
    far = torch.tensor([[1000.0, 0.0]], dtype=torch.float64)
    assert own.coefficients(far, None, rewards=rewards[:1]).abs().max() > 1000
    for divergence in (adpo.cross_entropy, adpo.reverse_kl, adpo.divergences.alpha(0.5)):
        bounded = adpo.Objective(adpo.bradley_terry(label_smoothing=0.1), divergence)
        assert bounded.coefficients(far, None, rewards=rewards[:1]).abs().max() <= 1
