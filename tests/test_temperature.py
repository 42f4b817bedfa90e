"""Schedules of tau: the printed formulas, the printed cases, state."""

import math
import random

import pytest
import torch

import adpo


def warmed(**options):
    """A guard that has seen a reward of 0 and then of 0: baseline 0, no variance."""
    guard = adpo.GuardedTau(0.5, 2.0, **options)
    for _ in range(2):
        guard.update(entropy=0.5, reward=0.0)
    return guard


def test_constant():
    assert adpo.ConstantTau(0.7).update(entropy=0.1, reward=9.0) == 0.7


def test_confident_but_wrong_keeps_tau_at_its_maximum():
    guard = warmed()
    assert guard.update(entropy=0.0, reward=0.0) == 2.0
    assert guard.update(entropy=0.0, reward=-5.0) == 2.0


def test_confident_and_improving_lowers_tau_to_its_minimum():
    assert warmed().update(entropy=0.0, reward=5.0) == pytest.approx(0.5)


def test_improving_without_confidence_keeps_the_guard_closed():
    assert warmed().update(entropy=1.0, reward=5.0) == 2.0


def test_the_direction_of_the_guard_is_a_choice():
    guard = warmed(opens_to="tau_max")
    assert guard.update(entropy=1.0, reward=0.0) == 0.5
    assert guard.update(entropy=0.0, reward=5.0) == pytest.approx(2.0)


def test_the_formula_as_printed_step_by_step():
    """p uses the baseline and the deviation from before the update."""
    guard = adpo.GuardedTau(0.5, 2.0, baseline_decay=0.8, std_floor=0.01)
    baseline, variance = None, 0.0
    for updates, (entropy, reward) in enumerate([(0.9, 0.1), (0.7, 0.3), (0.4, 0.35), (0.2, 0.1), (0.1, 0.6)]):
        if baseline is None:
            p, baseline = 0.0, reward
        elif updates < 2:
            p = 0.0
        else:
            corrected = variance / (1 - 0.8 ** (updates - 1))
            p = max(0.0, math.tanh((reward - baseline) / max(math.sqrt(corrected), 0.01)))
        expected = 2.0 - 1.5 * (1 - entropy) * p
        assert guard.update(entropy=entropy, reward=reward) == pytest.approx(expected)
        surprise = reward - baseline
        variance = 0.8 * variance + 0.2 * surprise**2
        baseline = 0.8 * baseline + 0.2 * reward
        assert guard.baseline == pytest.approx(baseline)


def test_a_stationary_reward_closes_the_guard():
    guard = adpo.GuardedTau(0.5, 2.0)
    taus = [guard.update(entropy=0.0, reward=0.4) for _ in range(20)]
    assert taus == [2.0] * 20


def test_noise_around_a_level_opens_the_guard_by_chance():
    """Half of the time the reward is above its average, however little is learnt."""
    guard = adpo.GuardedTau(tau_min=0.5, tau_max=2.0)
    draw = random.Random(0)
    taus = [guard.update(entropy=0.0, reward=draw.gauss(0.5, 0.05)) for _ in range(2000)]
    assert 0.4 < sum(tau < 1.9 for tau in taus) / len(taus) < 0.55
    assert 1.4 < sum(taus) / len(taus) < 1.8


def test_guard_per_group():
    guard = warmed()
    tau = guard.update(entropy=torch.tensor([0.0, 1.0, 0.0]), reward=torch.tensor([5.0, 5.0, -5.0]))
    torch.testing.assert_close(tau, torch.tensor([0.5, 2.0, 2.0]), rtol=1e-3, atol=1e-3)
    assert guard.baseline == pytest.approx(0.1 * 5 / 3)
    first = adpo.GuardedTau().update(entropy=torch.zeros(2), reward=torch.ones(2))
    assert first.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_state_survives_a_checkpoint(decay):
    one, other = (adpo.GuardedTau(baseline_decay=decay) for _ in range(2))
    for reward in (0.1, 0.5, 0.2):
        one.update(entropy=0.3, reward=reward)
    other.load_state_dict(one.state_dict())
    for reward in (0.9, 0.4):
        assert one.update(entropy=0.1, reward=reward) == other.update(entropy=0.1, reward=reward)


def test_hybrid_formula_and_bounds():
    hybrid = adpo.HybridTau(0.8, entropy_weight=0.2, reward_weight=0.5)
    assert hybrid.update(entropy=0.0, reward=0.0) == pytest.approx(0.8 * 1.5)
    assert hybrid.update(entropy=1.0, reward=0.3) == pytest.approx(0.8 * 1.2)
    assert hybrid.update(entropy=0.25, reward=0.4) == pytest.approx(0.8 * (1 + 0.05 + 0.5 * 0.75 * 0.6))
    assert adpo.HybridTau(0.8, tau_max=1.0).update(entropy=0.0, reward=0.0) == 1.0
    assert adpo.HybridTau(0.8, tau_min=0.7).update(entropy=0.0, reward=100.0) == 0.7
    tau = hybrid.update(entropy=torch.tensor([0.0, 1.0]), reward=0.0)
    torch.testing.assert_close(tau, torch.tensor([1.2, 0.96]))
    clamped = adpo.HybridTau(0.8, tau_max=1.0).update(entropy=torch.tensor([0.0, 1.0]), reward=torch.zeros(2))
    torch.testing.assert_close(clamped, torch.tensor([1.0, 0.96]))


def test_defaults_and_equal_bounds():
    guard = adpo.GuardedTau()
    assert (guard.tau_min, guard.tau_max, guard.baseline_decay, guard.std_floor) == (0.5, 2.0, 0.9, 1e-3)
    assert guard.state_dict() == {"baseline": 0.0, "variance": 0.0, "updates": 0}
    guard.update(entropy=0.5, reward=3.0)
    guard.update(entropy=0.5, reward=3.0)
    assert guard.state_dict() == {"baseline": 3.0, "variance": 0.0, "updates": 2}
    assert adpo.GuardedTau(1.0, 1.0).update(entropy=0.5, reward=0.0) == 1.0
    assert adpo.HybridTau(1.0, tau_min=1.0, tau_max=1.0).update(entropy=0.5, reward=0.0) == 1.0


def test_a_tensor_of_rewards_gives_one_tau_per_group_from_the_first_update():
    assert adpo.GuardedTau().update(entropy=0.5, reward=torch.ones(3)).tolist() == [2.0] * 3


def test_the_second_update_has_no_deviation_to_measure_by():
    guard = adpo.GuardedTau(0.5, 2.0)
    guard.update(entropy=0.0, reward=0.5)
    assert guard.update(entropy=0.0, reward=0.51) == 2.0


def test_integer_rewards_per_group():
    guard = warmed()
    tau = guard.update(entropy=0.0, reward=torch.tensor([1, 0]))
    assert tau.tolist() == pytest.approx([0.5, 2.0])


def test_tensors_are_clamped_like_numbers():
    low = adpo.HybridTau(0.8, tau_min=0.7).update(entropy=torch.tensor([0.0, 1.0]), reward=torch.tensor(100.0))
    torch.testing.assert_close(low, torch.tensor([0.7, 0.96]))
    edge = torch.tensor([-1e-8, 1 + 1e-7], dtype=torch.float64)
    taus = adpo.HybridTau(1.0).update(entropy=edge, reward=1.0)
    assert taus.tolist() == [1.0, 1.2]
    assert adpo.HybridTau(1.0, reward_weight=0.0).update(entropy=-1e-8, reward=0.0) == 1.0
    assert adpo.HybridTau(1.0, reward_weight=0.0).update(entropy=1 + 1e-8, reward=0.0) == 1.2


def test_rewards_that_carry_a_gradient_do_not_leak_it():
    reward = torch.ones(2, requires_grad=True)
    guard = warmed()
    assert not guard.update(entropy=torch.zeros(2, requires_grad=True), reward=reward).requires_grad


REFUSED = {
    "tau_min must be positive and finite; got -1.0": lambda: adpo.GuardedTau(-1.0, 2.0),
    "tau_base must be positive": lambda: adpo.HybridTau(0.0),
    "tau_min must be positive": lambda: adpo.HybridTau(tau_min=0.0),
    "tau_max must be positive": lambda: adpo.HybridTau(tau_max=math.inf),
    "tau must be positive": lambda: adpo.ConstantTau(0.0),
    "tau_min must not exceed tau_max; got 3.0 and 2.0": lambda: adpo.GuardedTau(3.0, 2.0),
    "tau_max must be positive and finite; got inf": lambda: adpo.GuardedTau(1.0, math.inf),
    "opens_to must be": lambda: adpo.GuardedTau(opens_to="up"),
    "baseline_decay must be in [0, 1); got 1.0": lambda: adpo.GuardedTau(baseline_decay=1.0),
    "std_floor must be positive and finite; got 0.0": lambda: adpo.GuardedTau(std_floor=0.0),
    "tau_min must not exceed tau_max; got 20.0 and 10.0": lambda: adpo.HybridTau(tau_min=20.0),
    "entropy must be normalised to [0, 1]; got 1.5": lambda: adpo.HybridTau().update(entropy=1.5, reward=0.0),
    "entropy must be normalised": lambda: adpo.GuardedTau().update(entropy=torch.tensor([-0.1]), reward=0.0),
    "reward must be finite; got nan": lambda: adpo.GuardedTau().update(entropy=0.5, reward=math.nan),
    "must hold ['baseline', 'updates', 'variance']; got []": lambda: adpo.GuardedTau().load_state_dict({}),
    "must hold []; got ['x']": lambda: adpo.ConstantTau().load_state_dict({"x": 1}),
    "must hold []; got ['y']": lambda: adpo.HybridTau().load_state_dict({"y": 1}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_nonsense_is_refused(message):
    with pytest.raises(ValueError, match=r".") as error:
        REFUSED[message]()
    assert message in str(error.value)


def test_a_refused_update_leaves_the_state_alone():
    guard = warmed()
    before = guard.state_dict()
    with pytest.raises(ValueError, match="finite"):
        guard.update(entropy=0.5, reward=math.inf)
    assert guard.state_dict() == before


def test_rounding_outside_the_unit_interval_is_forgiven():
    assert adpo.HybridTau(1.0).update(entropy=1 + 1e-8, reward=1.0) == pytest.approx(1.2)
