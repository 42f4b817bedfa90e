"""The textbook baselines against numbers worked out by hand, and the laws that tell them apart."""

import ast
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from adpo import baselines
from adpo.baselines.trpo import conjugate_gradient

W, L = torch.tensor([-1.0]), torch.tensor([-2.0])
RW, RL = torch.tensor([-1.5]), torch.tensor([-1.8])  # margin D = 0.5 + 0.2 = 0.7


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


BY_HAND = {
    "dpo": (lambda: baselines.dpo_loss(W, L, RW, RL, 0.5), -math.log(sigmoid(0.35))),
    "soft_dpo": (
        lambda: baselines.soft_dpo_loss(W, L, RW, RL, torch.tensor([0.8]), 0.5),
        -0.8 * math.log(sigmoid(0.35)) - 0.2 * math.log(sigmoid(-0.35)),
    ),
    "ipo": (lambda: baselines.ipo_loss(W, L, RW, RL, 0.5), (0.7 - 1.0) ** 2),
    "cpo": (lambda: baselines.cpo_loss(W, L, 0.5, 2.0), -math.log(sigmoid(0.5)) + 2.0),
    "slic inside": (lambda: baselines.slic_loss(W, L, None, 1.5, 0.1), 0.5 + 0.1),
    "slic outside": (lambda: baselines.slic_loss(W, L, torch.tensor([-3.0]), 0.5, 0.1), 0.3),
    "simpo": (lambda: baselines.simpo_loss(W, L, 2.0, 0.5), -math.log(sigmoid(1.5))),
    "kto": (
        lambda: baselines.kto_loss(
            torch.cat([W, L]), torch.cat([RW, RL]), torch.tensor([True, False]), 0.1, 2.0, 1.0, 0.5
        ),
        (1 - sigmoid(2 * (0.5 - 0.1)) + 0.5 * (1 - sigmoid(2 * (0.1 + 0.2)))) / 2,
    ),
    "kto negative kl": (
        lambda: baselines.kto_loss(W, RW, torch.tensor([True]), -3.0, 1.0),
        1 - sigmoid(0.5),
    ),
    "raft": (lambda: baselines.raft_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.0, 1.0]])), 2.0),
    "awr": (
        lambda: baselines.awr_loss(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 9.0]), 0.5, 20.0),
        (math.e + 40.0) / 2,
    ),
    "mpo": (
        lambda: baselines.mpo_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.0, 1.0]]), 0.5),
        1.0 * sigmoid(-2) + 2.0 * sigmoid(2),
    ),
    "sft": (lambda: baselines.sft_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([1])), math.log(2)),
    "kd": (lambda: baselines.kd_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 1.0]])), math.log(2)),
    "ppo inside": (
        lambda: baselines.ppo_clip_loss(torch.tensor([0.1]), torch.tensor([0.0]), torch.tensor([2.0])),
        -2 * math.exp(0.1),
    ),
    "ppo above": (
        lambda: baselines.ppo_clip_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0])),
        -2 * 1.2,
    ),
    "ppo below, bad": (
        lambda: baselines.ppo_clip_loss(torch.tensor([-1.0]), torch.tensor([0.0]), torch.tensor([-2.0])),
        2 * 0.8,
    ),
    "ppo above, bad": (
        lambda: baselines.ppo_clip_loss(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([-2.0])),
        2 * math.e,
    ),
    "kl_penalty": (
        lambda: baselines.kl_penalty_loss(
            torch.tensor([0.5]),
            torch.tensor([0.0]),
            torch.tensor([3.0]),
            torch.tensor([[0.0, 0.0]]),
            torch.tensor([[math.log(3), 0.0]]),
            0.5,
        ),
        0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) - 3 * math.exp(0.5),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    work, expected = BY_HAND[name]
    assert work().item() == pytest.approx(expected, rel=1e-5)


def test_the_clip_stops_the_gradient_only_on_the_far_side():
    for logp, advantage, moves in ((1.0, 1.0, False), (1.0, -1.0, True), (-1.0, -1.0, False), (-1.0, 1.0, True)):
        leaf = torch.tensor([logp], requires_grad=True)
        baselines.ppo_clip_loss(leaf, torch.zeros(1), torch.tensor([advantage])).backward()
        assert (leaf.grad.abs().item() > 0) == moves


def tokens(seed=0, sequences=4, length=6):
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(sequences, length, generator=generator, dtype=torch.float64) * 0.3 - 1
    old = logp + 0.05 * torch.randn(sequences, length, generator=generator, dtype=torch.float64)
    mask = torch.arange(length)[None] < torch.tensor([[6], [3], [1], [5]])
    return logp.requires_grad_(), old, torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64), mask


def test_group_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert baselines.group_advantages(rewards, scale=False).tolist() == [[0.75, -0.25, -0.25, -0.25]]
    assert baselines.group_advantages(rewards)[0, 0].item() == pytest.approx(0.75 / (0.5 + 1e-4))
    assert baselines.group_advantages(torch.ones(1, 4)).abs().max() == 0
    assert baselines.group_advantages(torch.ones(2, 1)).tolist() == [[0], [0]]


def test_grpo_and_dr_grpo_token_by_token():
    logp, old, advantages, mask = tokens()
    ref = old - 0.1
    per_sequence, total = [], 0.0
    for i in range(4):
        losses = []
        for t in range(6):
            if mask[i, t]:
                ratio = math.exp((logp - old)[i, t].item())
                a = advantages[i].item()
                loss = -min(ratio * a, min(max(ratio, 0.98), 1.03) * a)
                total += loss
                gap = (ref - logp)[i, t].item()
                losses.append(loss + 0.1 * (math.exp(gap) - 1 - gap))
        per_sequence.append(sum(losses) / len(losses))
    ours = baselines.grpo_loss(logp, old, advantages, mask, (0.02, 0.03), 0.1, ref)
    assert ours.item() == pytest.approx(sum(per_sequence) / 4)
    dr = baselines.dr_grpo_loss(logp, old, advantages, mask, 8, (0.02, 0.03))
    assert dr.item() == pytest.approx(total / (4 * 8))


def test_gspo_by_hand_and_both_forms_agree_in_value_and_gradient():
    logp, old, advantages, mask = tokens()
    expected = []
    for i in range(4):
        kept = mask[i]
        ratio = math.exp((logp - old)[i, kept].mean().item())
        a = advantages[i].item()
        expected.append(-min(ratio * a, min(max(ratio, 1 - 3e-4), 1 + 3e-4) * a))
    plain = baselines.gspo_loss(logp, old, advantages, mask)
    assert plain.item() == pytest.approx(sum(expected) / 4)
    straight = baselines.gspo_token_loss(logp, old, advantages, mask)
    torch.testing.assert_close(plain, straight)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logp)[0] for loss in (plain, straight)))


@pytest.mark.parametrize("rubbish", [-math.inf, math.nan, 1e30])
def test_padding_tokens_may_hold_anything(rubbish):
    logp, old, advantages, mask = tokens()
    losses = {
        "grpo": lambda x: baselines.grpo_loss(x, old, advantages, mask, beta=0.1, ref_token_logp=old),
        "dr_grpo": lambda x: baselines.dr_grpo_loss(x, old, advantages, mask, 8),
        "gspo": lambda x: baselines.gspo_loss(x, old, advantages, mask),
        "gspo per token": lambda x: baselines.gspo_token_loss(x, old, advantages, mask),
    }
    for loss in losses.values():
        spoiled = torch.where(mask, logp.detach(), rubbish).requires_grad_()
        torch.testing.assert_close(loss(spoiled), loss(logp))
        (gradient,) = torch.autograd.grad(loss(spoiled), spoiled)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss(logp), logp)[0])


def test_references_are_constants():
    reference = [torch.tensor([-1.5], requires_grad=True) for _ in range(2)]
    logp = [torch.tensor([-1.0], requires_grad=True) for _ in range(2)]
    for loss in (baselines.dpo_loss, baselines.ipo_loss):
        loss(*logp, *reference).backward()
    assert all(r.grad is None for r in reference)


def test_kl_regularised_rl_has_its_closed_form_optimum():
    ref, rewards = torch.randn(1, 4, dtype=torch.float64), torch.randn(1, 4, dtype=torch.float64)
    best = (ref + rewards / 0.3).requires_grad_()
    loss = baselines.kl_regularized_loss(best, ref, rewards, 0.3)
    assert torch.autograd.grad(loss, best)[0].abs().max() < 1e-12
    assert loss < baselines.kl_regularized_loss(best + torch.randn(1, 4), ref, rewards, 0.3)


def test_conjugate_gradient_solves_a_system():
    root = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix, b = root @ root.T + torch.eye(6), torch.arange(6.0, dtype=torch.float64)
    x = conjugate_gradient(lambda v: matrix @ v, b, iterations=20, tolerance=1e-24)
    torch.testing.assert_close(x, torch.linalg.solve(matrix, b))


def softmax_problem():
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Linear(4, 5).double()
    x = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    advantages = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    old = torch.log_softmax(net(x), 1).detach()

    def surrogate():
        return (torch.softmax(net(x), 1) * advantages).sum(1).mean()

    def kl():
        return (old.exp() * (old - torch.log_softmax(net(x), 1))).sum(1).mean()

    return net, surrogate, kl


def test_trpo_improves_and_stays_in_its_region():
    torch.manual_seed(0)
    net, surrogate, kl = softmax_problem()
    before = surrogate().item()
    step = baselines.trpo_step(net.parameters(), surrogate, kl, max_kl=0.02)
    assert step.accepted
    assert surrogate().item() == pytest.approx(before + step.improvement)
    assert step.improvement > 0
    assert 0.25 * 0.02 < kl().item() <= 0.02


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_trpo_does_not_care_about_the_scale_of_the_advantages(scale):
    torch.manual_seed(0)
    net, surrogate, kl = softmax_problem()
    step = baselines.trpo_step(net.parameters(), lambda: scale * surrogate(), kl, max_kl=0.02)
    assert step.accepted
    assert kl().item() > 0.005


def test_trpo_follows_the_natural_gradient():
    """Without damping and with enough iterations, the step is parallel to F^-1 g."""
    torch.manual_seed(0)
    net, surrogate, kl = softmax_problem()
    params = list(net.parameters())
    flat = torch.nn.utils.parameters_to_vector(params).detach().clone()
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(surrogate(), params)])
    kl_gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(kl(), params, create_graph=True)])
    rows = [
        torch.cat([r.reshape(-1) for r in torch.autograd.grad(g, params, retain_graph=True)]) for g in kl_gradient
    ]
    fisher = torch.stack(rows) + 1e-3 * torch.eye(len(rows))
    natural = torch.linalg.solve(fisher, gradient)
    baselines.trpo_step(params, surrogate, kl, max_kl=1e-4, iterations=100, damping=1e-3)
    moved = torch.nn.utils.parameters_to_vector(params).detach() - flat
    assert torch.nn.functional.cosine_similarity(moved, natural, dim=0) > 0.9999


def test_trpo_leaves_alone_what_the_loss_does_not_use():
    """A value head beside the policy, a layer of the KL alone, a frozen layer: the step is that of the policy."""
    torch.manual_seed(0)
    net, surrogate, kl = softmax_problem()
    torch.manual_seed(0)
    twin, of_twin, kl_of_twin = softmax_problem()
    value_head, frozen = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1).requires_grad_(False)
    before = torch.nn.utils.parameters_to_vector([*value_head.parameters(), *frozen.parameters()]).clone()
    step = baselines.trpo_step(
        [*value_head.parameters(), *net.parameters(), *frozen.parameters()], surrogate, kl, max_kl=0.02
    )
    alone = baselines.trpo_step(twin.parameters(), of_twin, kl_of_twin, max_kl=0.02)
    assert step.accepted
    assert step == pytest.approx(alone)
    after = torch.nn.utils.parameters_to_vector([*value_head.parameters(), *frozen.parameters()])
    assert torch.equal(after, before)


def test_trpo_takes_a_kl_that_not_all_parameters_reach():
    torch.manual_seed(0)
    net, surrogate, kl = softmax_problem()
    gain = torch.ones((), requires_grad=True)
    step = baselines.trpo_step([*net.parameters(), gain], lambda: gain * surrogate(), kl, max_kl=0.02)
    assert step.accepted
    assert kl().item() <= 0.02


def test_trpo_backs_off_and_gives_up_without_moving():
    torch.manual_seed(0)
    net, surrogate, kl = softmax_problem()
    start = torch.nn.utils.parameters_to_vector(net.parameters()).clone()
    calls = []

    def never_better():
        calls.append(1)
        return surrogate() if len(calls) == 1 else surrogate() * 0 - 100

    step = baselines.trpo_step(net.parameters(), never_better, kl, backtracks=3)
    assert not step.accepted
    assert step.backtracks == 3
    assert torch.equal(torch.nn.utils.parameters_to_vector(net.parameters()), start)
    flat = baselines.trpo_step(net.parameters(), lambda: surrogate() * 0, kl)
    assert not flat.accepted
    assert torch.equal(torch.nn.utils.parameters_to_vector(net.parameters()), start)


def test_no_baseline_uses_the_core():
    for path in Path(baselines.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in ("torch", "collections", "typing") or name.startswith(
                    "adpo.baselines"
                )


def test_simpo_and_dpo_differ_by_the_margin():
    torch.testing.assert_close(baselines.simpo_loss(W, L, 1.0, 0.0), -logsigmoid(W - L).mean())
