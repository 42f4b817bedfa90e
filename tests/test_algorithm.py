"""Algorithm 1: its steps, both modes, and that it learns."""

from pathlib import Path

import pytest
import torch
from torch import nn

import adpo
from adpo import algorithm
from adpo.algorithm import Algorithm1, Batch, group_entropy
from adpo.anchors import EMA, Fixed, Refresh, Snapshot, Zero


class Table(nn.Module):
    """A softmax policy over items for a few contexts, known by index."""

    def __init__(self, contexts=4, items=5):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = nn.Parameter(torch.randn(contexts, items, generator=generator, dtype=torch.float64))

    def forward(self, contexts, candidates):
        return torch.log_softmax(self.logits[contexts], -1).gather(-1, candidates)


class Bandit:
    """Clean rewards: item i of context x is worth (i + x) mod 5."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)
        self.calls = []

    def contexts(self):
        self.calls.append("contexts")
        return torch.arange(4)

    def sample(self, policy, contexts):
        self.calls.append("sample")
        with torch.no_grad():
            weights = torch.softmax(policy.logits[contexts], -1)
        return torch.multinomial(weights, 6, replacement=True, generator=self.generator)

    def rewards(self, contexts, candidates):
        self.calls.append("rewards")
        return ((candidates + contexts[:, None]) % 5).double()


def value(policy):
    items = torch.arange(5).expand(4, -1)
    truth = Bandit().rewards(torch.arange(4), items)
    return (torch.softmax(policy.logits, -1) * truth).sum(-1).mean().item()


def test_it_fits_on_a_page():
    assert len(Path(algorithm.__file__).read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    "objective",
    [
        adpo.presets.adpo(),
        adpo.presets.anchored_ranking(),
        adpo.presets.anchored_top1(),
        adpo.presets.reverse_adpo(),
    ],
    ids=["adpo", "ranking", "top1", "reverse"],
)
def test_online_learns(objective):
    policy = Table()
    before = value(policy)
    optimizer = torch.optim.Adam(policy.parameters(), 0.1)
    steps = list(
        Algorithm1(policy, objective, adpo.ConstantTau(), optimizer).online(Bandit(), iterations=60, inner_steps=2)
    )
    assert len(steps) == 120
    assert value(policy) > before + 1
    assert steps[-1].reward > steps[0].reward


def test_online_anchors_to_the_policy_that_sampled():
    policy, bandit = Table(), Bandit()
    optimizer = torch.optim.SGD(policy.parameters(), 0.5)
    steps = list(
        Algorithm1(policy, adpo.presets.adpo(), adpo.ConstantTau(), optimizer).online(
            bandit, iterations=3, inner_steps=2
        )
    )
    drift = [step.diagnostics.anchor_kl.item() for step in steps]
    assert drift[0::2] == pytest.approx([0, 0, 0], abs=1e-15)  # u = 0 at the first step after a rollout
    assert all(kl > 1e-4 for kl in drift[1::2])
    assert bandit.calls == ["contexts", "sample", "rewards"] * 3


def test_one_online_step_by_hand():
    """theta - eta * dL/dtheta with c = (1/K - q)/tau, the z-scored Boltzmann target."""
    policy, bandit = Table(), Bandit()
    start = policy.logits.detach().clone()
    optimizer = torch.optim.SGD(policy.parameters(), 0.3)
    list(Algorithm1(policy, adpo.presets.adpo(0.5), adpo.ConstantTau(0.7), optimizer).online(bandit, iterations=1))
    fresh = Bandit()
    contexts, twin = torch.arange(4), Table()
    candidates = fresh.sample(twin, contexts)
    rewards = fresh.rewards(contexts, candidates)
    std = rewards.std(-1, correction=0, keepdim=True)
    z = torch.where(std > 0, (rewards - rewards.mean(-1, keepdim=True)) / std, 0.0)
    c = (1 / 6 - torch.softmax(z / 0.5, -1)) / 0.7 / 4
    (twin(contexts, candidates) * c).sum().backward()
    torch.testing.assert_close(policy.logits.detach(), start - 0.3 * twin.logits.grad)


def rankings(count):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        candidates = torch.rand(4, 5, generator=generator).argsort(-1)[:, :3]
        rewards = Bandit().rewards(torch.arange(4), candidates)
        yield Batch(torch.arange(4), candidates, {"rewards": rewards})


@pytest.mark.parametrize(
    "make",
    [Snapshot, lambda p: EMA(p, 0.9), lambda p: Refresh(p, 5), lambda _: Fixed(Table()), lambda _: Zero()],
    ids=["self", "ema", "refresh", "fixed", "zero"],
)
def test_offline_learns_with_every_anchor(make):
    policy = Table()
    before = value(policy)
    optimizer = torch.optim.Adam(policy.parameters(), 0.1)
    steps = list(
        Algorithm1(policy, adpo.presets.anchored_ranking(), adpo.ConstantTau(), optimizer).offline(
            rankings(60), make(policy)
        )
    )
    assert len(steps) == 60
    assert value(policy) > before + 1


def test_offline_refreshes_a_dynamic_anchor_every_n_steps():
    policy = Table()
    optimizer = torch.optim.SGD(policy.parameters(), 0.5)
    anchor = Refresh(policy, 4)
    steps = list(
        Algorithm1(policy, adpo.presets.adpo(), adpo.ConstantTau(), optimizer).offline(rankings(9), anchor)
    )
    at_anchor = [i for i, step in enumerate(steps) if abs(step.diagnostics.anchor_kl.item()) < 1e-15]
    assert at_anchor == [0, 4, 8]


def test_offline_without_rewards_and_with_masks():
    policy = Table()
    mask = torch.tensor([[True, True, False]] * 4)
    batch = Batch(torch.arange(4), torch.tensor([[0, 1, 2]] * 4), {"ranks": torch.tensor([[1, 2, 9]] * 4)}, mask)
    optimizer = torch.optim.SGD(policy.parameters(), 0.5)
    start = policy.logits.detach().clone()
    algorithm = Algorithm1(policy, adpo.presets.anchored_ranking(), adpo.ConstantTau(), optimizer)
    (step,) = algorithm.offline([batch], Snapshot(policy))
    assert step.loss == pytest.approx(torch.tensor(2.0).log().item())
    assert step.reward != step.reward  # not a number: no rewards were given
    moved = policy.logits.detach() - start
    assert torch.all(moved[:, 0] > 0)
    assert torch.all(moved[:, 1] < 0)


def test_the_guarded_temperature_is_asked_once_a_rollout_per_context():
    policy = Table()
    asked = []

    class Spy(adpo.GuardedTau):
        def update(self, *, entropy, reward):
            asked.append((entropy, reward))
            return super().update(entropy=entropy, reward=reward)

    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    steps = list(
        Algorithm1(policy, adpo.presets.adpo(), Spy(), optimizer).online(Bandit(), iterations=3, inner_steps=2)
    )
    assert len(asked) == 3
    assert asked[0][0].shape == (4,)
    assert isinstance(asked[0][1], float)
    assert steps[0].tau.shape == (4,)


def test_group_entropy_is_normalised_over_real_candidates():
    logp = torch.log_softmax(torch.tensor([[0.0, 0.0, 5.0], [1.0, 1.0, 1.0], [50.0, 0.0, 0.0]]), -1)
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, True]])
    torch.testing.assert_close(group_entropy(logp, mask), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    assert group_entropy(torch.zeros(1, 1), None).tolist() == [0]
    assert group_entropy(torch.zeros(1, 2), torch.tensor([[False, False]])).tolist() == [0]


def test_one_step_a_rollout_never_leaves_the_anchor():
    """On-policy with one optimizer step: the policy moves, u is 0 at every gradient: the anchor cannot act."""
    policy = Table()
    start = policy.logits.detach().clone()
    optimizer = torch.optim.SGD(policy.parameters(), 0.5)
    algorithm = Algorithm1(policy, adpo.presets.adpo(), adpo.ConstantTau(0.3), optimizer)
    for step in algorithm.online(Bandit(), iterations=5):
        assert step.diagnostics.policy_entropy.item() == pytest.approx(torch.tensor(6.0).log().item())
        assert step.diagnostics.log_ratio.item() == 0
    assert (policy.logits.detach() - start).abs().max() > 0.1


def test_the_confidence_signal_is_an_argument():
    policy = Table()
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    schedule = adpo.HybridTau(1.0, entropy_weight=0.5, reward_weight=0.0)
    algorithm = Algorithm1(policy, adpo.presets.adpo(), schedule, optimizer, entropy=lambda logp, mask: 0.6)
    (step,) = algorithm.online(Bandit(), iterations=1)
    assert step.tau == pytest.approx(1.3)
