"""Anchors on small modules: where they are after rollouts and steps, and that lending leaves no trace."""

import copy

import pytest
import torch
from torch import nn

from adpo import anchors

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def make_policy(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def score(module):
    return torch.log_softmax(module(X.to(next(module.parameters()).dtype)), 1)


def move(policy, amount=0.1):
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += amount


def history(policy, anchor, steps, rollout_every=3):
    """Anchor log-probs and policy log-probs after every step."""
    seen = []
    for step in range(steps):
        if step % rollout_every == 0:
            anchor.on_rollout()
        move(policy)
        anchor.on_step()
        seen.append((anchor.logp(score), score(policy).detach()))
    return seen


def test_zero_has_no_log_probabilities():
    assert anchors.Zero().logp(score) is None
    assert not anchors.Zero().coincides


def test_fixed_is_another_module_and_never_moves():
    policy, reference = make_policy(), make_policy()
    move(reference, 0.3)
    anchor = anchors.Fixed(reference)
    expected = score(reference).detach()
    for logp, _ in history(policy, anchor, 4):
        assert torch.equal(logp, expected)
    assert not anchor.coincides


def test_self_is_the_initial_policy():
    policy = make_policy()
    start = score(policy).detach()
    anchor = anchors.Snapshot(policy)
    assert anchor.coincides
    for logp, _ in history(policy, anchor, 4):
        assert torch.equal(logp, start)
    assert not anchor.coincides


def test_on_policy_is_the_sampling_policy():
    policy = make_policy()
    anchor = anchors.OnPolicy(policy)
    start = score(policy).detach()
    seen = history(policy, anchor, 6)
    sampling = [start] * 3 + [seen[2][1]] * 3  # a new rollout came after the third step
    for (logp, _), expected in zip(seen, sampling, strict=True):
        assert torch.equal(logp, expected)
    anchor.on_rollout()
    assert anchor.coincides
    assert torch.equal(anchor.logp(score), score(policy))


def test_refresh_follows_every_n_steps():
    policy = make_policy()
    anchor = anchors.Refresh(policy, every=2)
    expected = score(policy).detach()
    for step, (logp, now) in enumerate(history(policy, anchor, 5), start=1):
        if step % 2 == 0:
            expected = now
        assert torch.equal(logp, expected)


def test_ema_is_the_moving_average_of_the_parameters():
    policy = make_policy()
    anchor = anchors.EMA(policy, decay=0.9)
    average = {name: p.detach().double() for name, p in policy.named_parameters()}
    for _ in range(10):
        move(policy, 0.05)
        anchor.on_step()
        average = {n: 0.9 * average[n] + 0.1 * p.detach().double() for n, p in policy.named_parameters()}
    twin = copy.deepcopy(policy)
    twin.load_state_dict({name: value.float() for name, value in average.items()})
    torch.testing.assert_close(anchor.logp(score), score(twin))


def test_ema_moves_in_bfloat16_where_a_bfloat16_average_would_not():
    policy = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        policy.weight.fill_(1.0)
    anchor, naive = anchors.EMA(policy, decay=0.999), torch.ones(1, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        policy.weight.fill_(2.0)
    for _ in range(1000):
        anchor.on_step()
        naive.lerp_(policy.weight.detach(), 0.001)
    expected = 2 - 0.999**1000
    assert anchor.shadow["weight"].dtype == torch.float32
    assert anchor.shadow["weight"].item() == pytest.approx(expected, abs=1e-3)
    assert naive.item() == 1.0  # every step is lost to rounding


class Adapted(nn.Module):
    """A frozen base with a trainable low-rank adapter, as LoRA has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(3, 2).requires_grad_(False)
        self.down, self.up = nn.Linear(3, 1, bias=False), nn.Linear(1, 2, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize(
    "make", [anchors.Snapshot, anchors.OnPolicy, anchors.EMA, lambda p: anchors.Refresh(p, 2)]
)
def test_an_adapter_is_anchored_without_copying_the_base(make):
    policy = Adapted()
    start = score(policy).detach()
    anchor = make(policy)
    assert sorted(anchor.shadow) == ["down.weight", "up.weight"]
    move(policy)
    assert torch.equal(anchor.logp(score), start)
    assert not torch.equal(score(policy), start)


def test_lending_leaves_no_trace_even_after_an_error():
    policy = make_policy()
    anchor = anchors.Snapshot(policy)
    move(policy)
    values = [p.detach().clone() for p in policy.parameters()]
    pointers = [p.data_ptr() for p in policy.parameters()]
    loss = score(policy).sum()  # a graph that must survive the lending
    anchor.logp(score)

    def failing(module):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        anchor.logp(failing)
    assert [p.data_ptr() for p in policy.parameters()] == pointers
    assert all(torch.equal(p, v) for p, v in zip(policy.parameters(), values, strict=True))
    loss.backward()
    (reference,) = torch.autograd.grad(score(policy).sum(), [policy[0].weight])
    assert torch.equal(policy[0].weight.grad, reference)


def test_anchor_log_probabilities_carry_no_gradient():
    policy = make_policy()
    for anchor in (anchors.Snapshot(policy), anchors.Fixed(make_policy())):
        assert not anchor.logp(score).requires_grad


class Dropping(nn.Module):
    """Dropout as a module, and as a function with a rate of its own, as attention has it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.dropout, self.attention_dropout = nn.Dropout(0.5), 0.5

    def forward(self, x):
        hidden = self.dropout(self.norm(self.first(x)))
        return self.last(nn.functional.dropout(hidden, self.attention_dropout, self.training))


@pytest.mark.parametrize(
    "make", [anchors.Snapshot, anchors.OnPolicy, anchors.EMA, lambda p: anchors.Refresh(p, 2), anchors.Fixed]
)
def test_an_anchor_has_no_dropout_in_it(make):
    torch.manual_seed(1)
    policy = Dropping().train()
    anchor = make(policy)
    twin = copy.deepcopy(policy)
    twin.dropout.p, twin.attention_dropout = 0.0, 0.0
    expected = score(twin).detach()  # of batch statistics, as those of the policy
    state = torch.get_rng_state()
    assert torch.equal(anchor.logp(score), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in policy.modules())

    def failing(module):
        raise RuntimeError("out of memory")

    policy.norm.eval()
    with pytest.raises(RuntimeError, match="out of memory"):
        anchor.logp(failing)
    assert [module.training for module in policy.children()] == [True, False, True, True]
    assert policy.training


class ReadingRate(nn.Module):
    """The rate is read off a module that is never called, as GPT-2's attention does."""

    def __init__(self):
        super().__init__()
        self.linear, self.rate = nn.Linear(3, 2), nn.Dropout(0.5)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x), self.rate.p if self.training else 0.0)


@pytest.mark.parametrize("mode_of_rate", [True, False])
def test_a_rate_that_is_read_off_another_module_counts_too(mode_of_rate):
    policy = nn.Sequential(ReadingRate(), nn.Tanh()).train()
    policy[0].rate.train(mode_of_rate)
    anchor = anchors.Snapshot(policy)
    expected = score(copy.deepcopy(policy).eval()).detach()
    assert torch.equal(anchor.logp(score), expected)
    assert policy[0].rate.p == 0.5
    assert [module.training for module in policy[0].modules()] == [True, True, mode_of_rate]


class PowerMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = 3.0

    def forward(self, x):
        return x.abs().pow(self.p).mean(1, keepdim=True).pow(1 / self.p) * x


def test_an_exponent_is_no_rate():
    policy = nn.Sequential(nn.Linear(3, 2), PowerMean()).train()
    assert torch.equal(anchors.Snapshot(policy).logp(score), score(policy))


def test_a_policy_without_dropout_is_scored_in_the_mode_it_is_in():
    """A compiled graph is one of training or of evaluation: u = 0 to the bit needs the same for both."""
    policy = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)).train()
    seen = []

    def noting(module):
        seen.extend(each.training for each in module.modules())
        return score(module)

    anchors.Snapshot(policy).logp(noting)
    assert seen == [True, True, True]


def test_buffers_belong_to_the_anchor():
    policy = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    anchor, average = anchors.Snapshot(policy), anchors.EMA(policy)
    start = score(policy).detach()
    policy[1].running_mean += 1.0
    average.on_step()
    assert torch.equal(anchor.logp(score), start)
    assert torch.equal(average.logp(score), score(policy))


@pytest.mark.parametrize(
    "make", [anchors.Snapshot, anchors.OnPolicy, lambda p: anchors.EMA(p, 0.9), lambda p: anchors.Refresh(p, 3)]
)
def test_state_survives_a_checkpoint(make):
    policy = make_policy()
    anchor = make(policy)
    history(policy, anchor, 4)
    saved_policy, saved = copy.deepcopy(policy.state_dict()), anchor.state_dict()
    expected = history(policy, anchor, 4)
    fresh_policy = make_policy()
    move(fresh_policy, 7.0)
    fresh = make(fresh_policy)
    fresh_policy.load_state_dict(saved_policy)
    fresh.load_state_dict(saved)
    for (a, b), (c, d) in zip(history(fresh_policy, fresh, 4), expected, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_freezing_or_unfreezing_later_does_not_change_what_is_anchored():
    policy = make_policy()
    policy[0].weight.requires_grad_(False)
    anchor, start = anchors.Snapshot(policy), score(policy).detach()
    policy[2].requires_grad_(False)  # frozen after it has been anchored
    policy[0].weight.requires_grad_(True)  # unfrozen, never anchored
    with torch.no_grad():
        policy[2].weight += 0.5
    assert torch.equal(anchor.logp(score), start)

    def toggling(module):
        module.requires_grad_(not next(module.parameters()).requires_grad)
        return score(module)

    moved = policy[2].weight.detach().clone()
    anchor.logp(toggling)
    assert torch.equal(policy[2].weight, moved)


def test_a_module_in_training_mode_cannot_write_into_the_anchor():
    policy = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).train()
    anchor = anchors.Snapshot(policy)
    before = anchor.shadow["1.running_mean"].clone()
    anchor.logp(score)
    assert torch.equal(anchor.shadow["1.running_mean"], before)


def test_whether_anchor_and_policy_coincide_is_looked_up_after_loading():
    policy = make_policy()
    saved = anchors.OnPolicy(policy).state_dict()
    move(policy)
    anchor = anchors.OnPolicy(policy)
    assert anchor.coincides
    anchor.load_state_dict(saved)
    assert not anchor.coincides
    move(policy, -0.1)
    fresh = anchors.OnPolicy(policy)
    fresh.load_state_dict(anchors.Snapshot(policy).state_dict())
    assert fresh.coincides


def test_saved_state_is_not_an_alias():
    policy = make_policy()
    anchor = anchors.EMA(policy, 0.5)
    saved = anchor.state_dict()
    before = saved["shadow"]["0.weight"].clone()
    move(policy)
    anchor.on_step()
    assert torch.equal(saved["shadow"]["0.weight"], before)


def test_nonsense_is_refused():
    policy = make_policy()
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\); got 1\.0"):
        anchors.EMA(policy, decay=1.0)
    with pytest.raises(ValueError, match="every must be at least 1; got 0"):
        anchors.Refresh(policy, every=0)
    with pytest.raises(ValueError, match="has no state"):
        anchors.Zero().load_state_dict({"x": 1})
    foreign = anchors.Snapshot(nn.Linear(3, 9)).state_dict()
    with pytest.raises(ValueError, match=r"does not fit this policy; first difference: 0\.bias"):
        anchors.Snapshot(policy).load_state_dict(foreign)
    other = anchors.Snapshot(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))).state_dict()
    with pytest.raises(ValueError, match=r"does not fit this policy; first difference: 0\.weight"):
        anchors.Snapshot(policy).load_state_dict(other)


@pytest.mark.parametrize("policy_first", [True, False])
def test_autocast_does_not_remember_the_other_one(policy_first):
    """It keeps the narrow copy of a parameter as long as its block lasts; lending changes what is in it."""
    policy = make_policy()
    anchor = anchors.Snapshot(policy)
    there = score(policy).detach()
    with torch.no_grad():
        policy[2].weight += torch.tensor([[1.0], [-1.0]])
    here = score(policy).detach()
    with torch.autocast("cpu", torch.bfloat16):
        before = [score(policy)] if policy_first else []
        lent = anchor.logp(score)
        after = score(policy)
    for found, expected in ((lent, there), (after, here), *((each, here) for each in before)):
        torch.testing.assert_close(found.detach().float(), expected, rtol=0.05, atol=0.05)
    assert (here - there).abs().max() > 0.2
