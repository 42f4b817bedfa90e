"""The taxonomy: each preset equals its textbook baseline in value and gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adpo
from adpo import baselines
from adpo.core import presets
from draws import groups


def same(ours, theirs, leaf, tolerance=1e-9):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


full_support = groups(min_k=2, ragged=False)
pairs = groups(min_k=2, max_k=2, ragged=False)
betas = st.sampled_from([0.05, 0.1, 1.0, 3.0])


@given(g=full_support)
def test_sft_over_the_full_support(g):
    logits = g.logp.clone().requires_grad_()
    labels = g.rewards.argmax(1)
    ours = presets.sft().loss(torch.log_softmax(logits, 1), None, labels=labels)
    same(ours, baselines.sft_loss(logits, labels), logits)


@given(g=full_support)
def test_sft_over_a_sampled_group_is_contrastive(g):
    """Over a subset, only ratios inside the group are learnt: it is not the likelihood."""
    logp = (g.logp - 20).requires_grad_()  # log-probabilities of rare candidates
    labels = g.rewards.argmax(1)
    ours = presets.sft().loss(logp, None, labels=labels)
    assert ours < -logp.gather(1, labels[:, None]).mean() - 1
    assert torch.autograd.grad(ours, logp)[0].sum().abs() < 1e-9


@given(g=full_support)
def test_kd_over_the_full_support(g):
    logits = g.logp.clone().requires_grad_()
    ours = presets.kd().loss(torch.log_softmax(logits, 1), None, teacher_logp=torch.log_softmax(g.teacher_logp, 1))
    same(ours, baselines.kd_loss(logits, g.teacher_logp), logits)


@given(g=pairs, beta=betas)
def test_dpo(g, beta):
    logp = g.logp.clone().requires_grad_()
    wins = torch.rand(len(logp), generator=g.generator) < 0.5
    rewards = torch.stack([wins, ~wins], 1).double()
    winner, loser = (~wins).long()[:, None], wins.long()[:, None]
    theirs = baselines.dpo_loss(
        *(table.gather(1, who)[:, 0] for table in (logp, g.anchor_logp) for who in (winner, loser)), beta=beta
    )
    same(presets.dpo(beta).loss(logp, g.anchor_logp, rewards=rewards), theirs, logp)


@given(g=pairs, beta=betas)
def test_soft_dpo(g, beta):
    logp = g.logp.clone().requires_grad_()
    preference = torch.rand(len(logp), generator=g.generator, dtype=torch.float64)
    theirs = baselines.soft_dpo_loss(
        logp[:, 0], logp[:, 1], g.anchor_logp[:, 0], g.anchor_logp[:, 1], preference, beta
    )
    same(presets.soft_dpo(beta).loss(logp, g.anchor_logp, preference=preference), theirs, logp)
    hard = torch.ones_like(preference)
    same(
        presets.soft_dpo(beta).loss(logp, g.anchor_logp, preference=hard),
        presets.dpo(beta).loss(logp, g.anchor_logp, preference=hard),
        logp,
    )


@given(g=full_support, beta=betas)
def test_listwise_raw_and_adpo_by_their_formula(g, beta):
    logp = g.logp.clone().requires_grad_()
    log_p = torch.log_softmax((logp - g.anchor_logp) / 0.8, 1)
    raw = -(torch.softmax(g.rewards / beta, 1) * log_p).sum(1).mean()
    same(presets.listwise_raw(beta, 0.8).loss(logp, g.anchor_logp, rewards=g.rewards), raw, logp)
    std = g.rewards.std(1, correction=0, keepdim=True)
    z = torch.where(std > 1e-12, (g.rewards - g.rewards.mean(1, keepdim=True)) / std.clamp(min=1e-12), 0.0)
    standard = -(torch.softmax(z / beta, 1) * log_p).sum(1).mean()
    same(presets.adpo(beta, 0.8).loss(logp, g.anchor_logp, rewards=g.rewards), standard, logp)


@given(g=full_support)
def test_rankings_by_their_formula(g):
    logp = g.logp.clone().requires_grad_()
    order = torch.randperm(logp.shape[1], generator=g.generator)
    rewards = order.double().expand_as(logp)
    u = ((logp - g.anchor_logp) / 0.8)[:, order.argsort(descending=True)]
    k = u.shape[1]
    nll = sum(torch.logsumexp(u[:, i:], 1) - u[:, i] for i in range(k - 1)).mean()
    same(presets.anchored_ranking(0.8).loss(logp, g.anchor_logp, rewards=rewards), nll, logp)
    first = (torch.logsumexp(u, 1) - u[:, 0]).mean()
    same(presets.anchored_top1(0.8).loss(logp, g.anchor_logp, rewards=rewards), first, logp)
    p = torch.softmax((logp - g.anchor_logp) / 0.8, 1)
    reverse = (p * (p.log() - torch.log_softmax(rewards / 0.5, 1))).sum(1).mean()
    same(presets.reverse_adpo(0.5, 0.8).loss(logp, g.anchor_logp, rewards=rewards), reverse, logp)


@given(g=pairs)
def test_for_a_pair_every_ranking_is_dpo(g):
    logp = g.logp.clone().requires_grad_()
    dpo = presets.dpo(beta=1 / 0.8).loss(logp, g.anchor_logp, rewards=g.rewards)
    for preset in (
        presets.anchored_ranking(0.8),
        presets.anchored_ranking(0.8, "breslow"),
        presets.anchored_top1(0.8),
    ):
        same(preset.loss(logp, g.anchor_logp, rewards=g.rewards), dpo, logp)


def test_the_taxonomy_lists_every_preset_once():
    functions = [row.preset.__name__ for row in presets.TAXONOMY]
    assert functions == [
        "sft", "kd", "dpo", "soft_dpo", "adpo", "listwise_raw", "anchored_ranking", "anchored_top1",
        "reverse_adpo",
    ]  # fmt: skip
    assert all(isinstance(row.objective, adpo.Objective) for row in presets.TAXONOMY)
    assert len({row.behaviour for row in presets.TAXONOMY}) == len(functions)


def test_dpo_defaults_to_beta_a_tenth():
    assert presets.dpo().tau == pytest.approx(10)
    assert presets.adpo().target == adpo.boltzmann(1.0, standardize=True)
