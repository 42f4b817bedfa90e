"""Each target against numbers worked out by hand or by another library, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import adpo
from adpo.core.groups import prepare
from adpo.core.rewards import kernel_cdf, standardized

ZEROS = torch.zeros(1, 3, dtype=torch.float64)


def q_of(target, signals, mask=None, anchor=None, tau=1.0, shape=None):
    """The first stage's distribution."""
    first = next(iter(signals.values()))
    logp = torch.zeros(shape or first.shape, dtype=torch.float64)
    _, checked = prepare(logp, anchor, tau, {"mask": mask, **signals})
    stage = next(iter(target.stages(checked)))
    return torch.where(stage.support(), stage.log_q.exp(), 0.0)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_one_hot():
    labels = torch.tensor([2])
    assert q_of(adpo.one_hot(), {"labels": labels}, shape=(1, 3)).tolist() == [[0, 0, 1]]
    smoothed = q_of(adpo.one_hot(label_smoothing=0.3), {"labels": labels}, shape=(1, 3))
    torch.testing.assert_close(smoothed, row(0.1, 0.1, 0.8))


def test_smoothing_is_spread_over_real_candidates_only():
    mask = torch.tensor([[True, False, True]])
    q = q_of(adpo.one_hot(label_smoothing=0.3), {"labels": torch.tensor([2])}, mask, shape=(1, 3))
    torch.testing.assert_close(q, row(0.15, 0.0, 0.85))


def test_smoothing_agrees_with_torch_cross_entropy():
    logits = torch.randn(4, 5, dtype=torch.float64)
    labels = torch.tensor([0, 3, 4, 1])
    ours = adpo.Objective(adpo.one_hot(label_smoothing=0.2)).loss(logits, None, labels=labels)
    theirs = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    torch.testing.assert_close(ours, theirs)


def test_teacher_plain_and_anchored():
    teacher, anchor = row(0.0, 1.0, 2.0), row(0.5, 0.5, 0.0)
    plain = q_of(adpo.targets.teacher(), {"teacher_logp": teacher}, anchor=anchor)
    torch.testing.assert_close(plain, torch.softmax(teacher, 1))
    anchored = q_of(adpo.targets.teacher(anchored=True), {"teacher_logp": teacher}, anchor=anchor, tau=0.5)
    torch.testing.assert_close(anchored, torch.softmax((teacher - anchor) / 0.5, 1))
    per_group = q_of(
        adpo.targets.teacher(anchored=True), {"teacher_logp": teacher}, anchor=anchor, tau=torch.tensor([0.25])
    )
    torch.testing.assert_close(per_group, torch.softmax((teacher - anchor) / 0.25, 1))


def test_boltzmann_raw_standardised_and_with_the_prior():
    rewards, anchor = row(1.0, 2.0, 4.0), row(0.3, 0.0, -0.3)
    torch.testing.assert_close(q_of(adpo.boltzmann(0.5), {"rewards": rewards}), torch.softmax(rewards / 0.5, 1))
    z = torch.tensor(stats.zscore(rewards.numpy(), axis=1))
    standard = q_of(adpo.boltzmann(0.5, standardize=True), {"rewards": rewards})
    torch.testing.assert_close(standard, torch.softmax(z / 0.5, 1))
    prior = q_of(adpo.boltzmann(0.5, reference=True), {"rewards": rewards}, anchor=anchor)
    torch.testing.assert_close(prior, torch.softmax(anchor + rewards / 0.5, 1))


def test_boltzmann_with_huge_rewards_and_a_tiny_beta():
    q = q_of(adpo.boltzmann(1e-10), {"rewards": row(1e300, 0.0, -1e300)})
    assert q.tolist() == [[1, 0, 0]]
    c = adpo.Objective(adpo.boltzmann(1e-10)).coefficients(ZEROS, None, rewards=row(1e300, 0.0, -1e300))
    torch.testing.assert_close(c, row(-2 / 3, 1 / 3, 1 / 3))


@pytest.mark.parametrize("value", [0.1, -3.3, 1e300, 0.0])
def test_equal_rewards_have_no_z_scores_however_they_round(value):
    rewards = torch.full((1, 7), value, dtype=torch.float64)
    assert torch.all(standardized(rewards, torch.ones_like(rewards, dtype=torch.bool)) == 0)
    torch.testing.assert_close(q_of(adpo.kde(), {"rewards": rewards}), torch.full_like(rewards, 1 / 7))


def test_z_scores_of_huge_and_ragged_rewards():
    rewards = row(-1.5e308, 0.0, 1.5e308, 7.0)
    mask = torch.tensor([[True, True, True, False]])
    half = math.sqrt(1.5)
    torch.testing.assert_close(standardized(rewards, mask), row(-half, 0.0, half, 0.0))


def test_kde_follows_its_recipe():
    rewards = np.array([0.3, -1.2, 0.8, 2.5, 0.1, 40.0])
    size = len(rewards)
    q75, q25 = np.percentile(rewards, [75, 25])
    h = 1.06 * min(rewards.std(), (q75 - q25) / 1.34) * size**-0.2
    cdf = stats.norm.cdf((rewards[:, None] - rewards[None, :]) / h).mean(1).clip(1e-4, 1 - 1e-4)
    logits = np.log(cdf / (1 - cdf)) / 0.8
    expected = np.exp(logits) / np.exp(logits).sum()
    q = q_of(adpo.kde(0.8), {"rewards": torch.tensor(rewards)[None]})
    np.testing.assert_allclose(q[0].numpy(), expected, rtol=1e-9)


def test_kde_falls_back_to_the_deviation_when_the_quartiles_meet():
    rewards = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    h = 1.06 * rewards.std() * 6**-0.2
    cdf = stats.norm.cdf((rewards[:, None] - rewards[None, :]) / h).mean(1)
    logits = np.log(cdf / (1 - cdf))
    q = q_of(adpo.kde(1.0), {"rewards": torch.tensor(rewards)[None]})
    np.testing.assert_allclose(q[0].numpy(), np.exp(logits) / np.exp(logits).sum(), rtol=1e-9)


def test_kde_clips_the_tails():
    # With more than 5,000 candidates the outermost distribution values leave [1e-4, 1 - 1e-4].
    rewards = torch.randn(1, 6000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards[0, 0], rewards[0, 1] = -1e6, 1e6
    q = q_of(adpo.kde(1.0), {"rewards": rewards})[0]
    assert (q[1] / q[0]).log().item() == pytest.approx(2 * math.log((1 - 1e-4) / 1e-4))


def kde_by_hand(rewards):
    """The recipe on one group, in numpy."""
    q75, q25 = np.percentile(rewards, [75, 25])
    std = rewards.std()
    scale = min(std, (q75 - q25) / 1.34) if q75 > q25 else std
    if scale == 0:
        return np.full(len(rewards), 0.5)
    h = 1.06 * scale * len(rewards) ** -0.2
    return stats.norm.cdf((rewards[:, None] - rewards[None, :]) / h).mean(1)


def test_ragged_groups_one_by_one():
    """z-scores and kernel distribution functions of a ragged table, group by group."""
    rng = np.random.default_rng(0)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0]]).bool()
    rewards = torch.tensor(rng.normal(3.0, [[1.0], [10.0], [0.1], [1.0]], (4, 6)))
    rewards[2] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 2.0])  # quartiles meet
    z, cdf = standardized(rewards, mask), kernel_cdf(rewards, mask)
    assert torch.all(z[~mask] == 0)
    for i in range(4):
        alone = rewards[i, mask[i]].numpy()
        expected = stats.zscore(alone) if len(alone) > 1 else np.zeros(1)
        np.testing.assert_allclose(z[i, mask[i]], expected, rtol=1e-9)
        np.testing.assert_allclose(cdf[i, mask[i]], kde_by_hand(alone), rtol=1e-9)


def test_bounded_memory_takes_whole_groups_in_blocks():
    """At most `cells` kernel values at a time, and one group at least."""
    seen = []
    rewards, mask = torch.randn(10, 4, dtype=torch.float64), torch.ones(10, 4, dtype=torch.bool)
    original = torch.special.ndtr
    torch.special.ndtr = lambda x: (seen.append(x.shape[0]), original(x))[1]
    try:
        kernel_cdf(rewards, mask, cells=50)
        kernel_cdf(rewards, mask, cells=1)
    finally:
        torch.special.ndtr = original
    assert seen == [3, 3, 3, 1] + [1] * 10


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (adpo.one_hot(), "one_hot() needs the signal `labels`"),
        (adpo.targets.soft(), "soft() needs the signal `q`"),
        (adpo.targets.teacher(), "teacher() needs the signal `teacher_logp`"),
        (adpo.boltzmann(1.0), "boltzmann() needs the signal `rewards`"),
        (adpo.kde(), "kde() needs the signal `rewards`"),
        (adpo.top1(), "top1() needs the signal `rewards` or `ranks`"),
        (adpo.plackett_luce(), "plackett_luce() needs the signal `rewards` or `ranks`"),
    ],
)
def test_a_missing_signal_is_named_with_its_target(target, name):
    with pytest.raises(ValueError, match=r".") as error:
        adpo.Objective(target).loss(ZEROS, None)
    assert str(error.value).startswith(name)
    _, checked = prepare(ZEROS, None, 1.0, {})
    with pytest.raises(ValueError, match=r".") as error:
        list(target.stages(checked))
    assert str(error.value).startswith(name)
    with pytest.raises(ValueError, match=r".") as error:
        target.entropy(checked)
    assert str(error.value).startswith(name)


def test_kernel_cdf_does_not_depend_on_the_blocks():
    rewards = torch.randn(7, 5, dtype=torch.float64)
    mask = torch.rand(7, 5) < 0.8
    whole, pieces = kernel_cdf(rewards, mask), kernel_cdf(rewards, mask, cells=30)
    torch.testing.assert_close(whole[mask], pieces[mask], rtol=0, atol=0)


def test_top1_shares_the_mass_among_tied_winners():
    torch.testing.assert_close(q_of(adpo.top1(), {"rewards": row(2.0, 1.0, 2.0)}), row(0.5, 0.0, 0.5))
    torch.testing.assert_close(q_of(adpo.top1(), {"ranks": row(2, 1, 3)}), row(0.0, 1.0, 0.0))


def test_bradley_terry_winner_silence_and_preference():
    objective = adpo.Objective(adpo.bradley_terry())
    logp = torch.tensor([[0.2, -0.3], [0.1, 0.4], [1.0, 2.0]], dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0.0], [0.0, 5.0], [3.0, 3.0]])
    losses = objective.loss(logp, None, rewards=rewards, reduction="none")
    expected = [math.log1p(math.exp(-0.5)), math.log1p(math.exp(-0.3)), 0.0]
    assert losses.tolist() == pytest.approx(expected)
    q = q_of(adpo.bradley_terry(), {"preference": torch.tensor([0.3])}, shape=(1, 2))
    torch.testing.assert_close(q, row(0.3, 0.7))


def test_each_group_needs_its_own_label():
    with pytest.raises(ValueError, match="labels at group 1 is 5"):
        adpo.Objective(adpo.one_hot()).loss(torch.zeros(2, 3), None, labels=torch.tensor([0, 5]))


def test_soft_targets_that_miss_one_from_below_are_renormalised():
    q = q_of(adpo.targets.soft(), {"q": row(0.2, 0.3, 0.495)})
    torch.testing.assert_close(q, row(0.2, 0.3, 0.495) / 0.995)
    padded = adpo.Objective(adpo.targets.soft()).loss(
        torch.zeros(2, 2),
        None,
        q=torch.tensor([[0.5, 0.5], [0.0, 0.0]]),
        mask=torch.tensor([[True] * 2, [False] * 2]),
    )
    assert padded.item() == pytest.approx(math.log(2))


def test_huge_rewards_of_one_group_do_not_reach_another():
    rewards = torch.tensor([[1e300, 0.0], [0.0, 1e-10]], dtype=torch.float64)
    q = q_of(adpo.boltzmann(1e-10), {"rewards": rewards})
    torch.testing.assert_close(q, torch.tensor([[1.0, 0.0], [1 / (1 + math.e), math.e / (1 + math.e)]]).double())


@pytest.mark.parametrize("preference", [0.0, 1.0])
def test_a_certain_preference_is_a_preference(preference):
    q = q_of(adpo.bradley_terry(), {"preference": torch.tensor([preference])}, shape=(1, 2))
    assert q.tolist() == [[preference, 1 - preference]]


def test_soft_targets_of_low_precision_are_renormalised():
    q = torch.tensor([[0.3, 0.7]], dtype=torch.float16)
    assert q_of(adpo.targets.soft(), {"q": q}).sum().item() == pytest.approx(1, abs=1e-15)


ROW = torch.zeros(1, 3)
REFUSED = {
    "needs the signal `rewards`; got `labels`": lambda: adpo.Objective(adpo.boltzmann(1.0)).loss(
        ROW, None, labels=torch.tensor([0])
    ),
    "needs the signal `labels`; got no signal": lambda: adpo.Objective(adpo.one_hot()).loss(ROW, None),
    "takes one of `rewards` or `ranks`": lambda: adpo.Objective(adpo.top1()).loss(
        ROW, None, rewards=ROW, ranks=ROW
    ),
    "did you mean `mask`": lambda: adpo.Objective(adpo.top1()).loss(ROW, None, masks=ROW),
    "did you mean `rewards`": lambda: adpo.Objective(adpo.top1()).loss(ROW, None, reward=ROW),
    "known signals: rewards": lambda: adpo.Objective(adpo.top1()).loss(ROW, None, zebra=ROW),
    "labels at group 0 is 3.0; expected the index": lambda: adpo.Objective(adpo.one_hot()).loss(
        ROW, None, labels=torch.tensor([3])
    ),
    "bradley_terry() needs the signal `rewards` or `preference`": lambda: adpo.Objective(
        adpo.bradley_terry()
    ).loss(ROW[:, :2], None),
    "plackett_luce() needs the signal `rewards` or `ranks`": lambda: adpo.Objective(adpo.plackett_luce()).loss(
        ROW, None
    ),
    "is 1.5; expected a probability": lambda: adpo.Objective(adpo.bradley_terry()).loss(
        ROW[:, :2], None, preference=torch.tensor([1.5])
    ),
    "K = 2; got K = 3": lambda: adpo.Objective(adpo.bradley_terry()).loss(ROW, None, rewards=ROW),
    "preference at group 0 is 1.5": lambda: adpo.Objective(adpo.bradley_terry()).loss(
        ROW[:, :2], None, preference=torch.tensor([1.5])
    ),
    "preference at group 0 is -0.5": lambda: adpo.Objective(adpo.bradley_terry()).loss(
        ROW[:, :2], None, preference=torch.tensor([-0.5])
    ),
    "q at group 0, candidate 1 is -0.5": lambda: adpo.Objective(adpo.targets.soft()).loss(
        ROW[:, :2], None, q=torch.tensor([[1.5, -0.5]])
    ),
    "sum of q at group 0 is 0.5": lambda: adpo.Objective(adpo.targets.soft()).loss(
        ROW[:, :2], None, q=torch.tensor([[0.25, 0.25]])
    ),
    "beta must be positive": lambda: adpo.boltzmann(0.0),
    "beta must be positive and finite; got inf": lambda: adpo.kde(math.inf),
    "label_smoothing must be in": lambda: adpo.one_hot(label_smoothing=1.0),
    "label_smoothing must be in [0, 1); got -0.1": lambda: adpo.plackett_luce(label_smoothing=-0.1),
    'ties must be "efron" or "breslow"': lambda: adpo.plackett_luce("random"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_understood_is_refused(message):
    with pytest.raises((ValueError, TypeError)) as error:
        REFUSED[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_label_on_a_masked_candidate_is_refused_and_padding_groups_need_none():
    mask = torch.tensor([[True, False], [False, False]])
    objective = adpo.Objective(adpo.one_hot())
    with pytest.raises(ValueError, match="labels at group 0 is 1"):
        objective.loss(torch.zeros(2, 2), None, labels=torch.tensor([1, 9]), mask=mask)
    assert objective.loss(torch.zeros(2, 2), None, labels=torch.tensor([0, 9]), mask=mask).item() == 0


def test_targets_are_values():
    assert adpo.boltzmann(0.5) == adpo.boltzmann(0.5)
    assert adpo.boltzmann(0.5) != adpo.boltzmann(0.6)
    assert repr(adpo.boltzmann(0.5)) == "boltzmann(beta=0.5, standardize=False, reference=False)"
    assert adpo.Objective(adpo.kde()) == adpo.Objective(adpo.kde())
    with pytest.raises(AttributeError):
        adpo.Objective(adpo.kde()).tau = 2.0
