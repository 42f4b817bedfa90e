"""Experiment 1: the stacked computation, the worlds, the measures, and what must be true of the science."""

from dataclasses import replace

import pytest
import torch

from adpo import Objective, plackett_luce, top1
from adpo.baselines.trpo import trpo_step
from adpo.bench.bandits import train_alone, weights_of
from adpo.experiments.bandits import fleet
from adpo.experiments.bandits.measure import Exam
from adpo.experiments.bandits.methods import GRID, Batch, Groupwise, grid, make, together
from adpo.experiments.bandits.natural import TrustRegion, natural_step
from adpo.experiments.bandits.protocol import CLEAN, SCENARIOS, UNLEARNABLE, Protocol
from adpo.experiments.bandits.studies import Popular, popular_but_wrong
from adpo.experiments.bandits.train import train
from adpo.experiments.bandits.world import Replica, Worlds
from adpo.experiments.statistics import holm, interval, paired

SMALL = replace(Protocol(), iterations=5, hidden=16, contexts=16, test_contexts=100, held_out_lists=100)


def some_methods():
    return [
        make("sft-best", {}),
        make("dpo-hard", {"beta": 0.25}),
        make("adpo-pairwise", {"beta": 1.0, "tau": 2.0}),
        make("adpo-kde", {"beta": 1.0, "tau": 4.0}),
        make("adpo-ranking", {"tau": 4.0}),
        make("adpo-on-policy", {"beta": 1.0, "tau": 1.0}),
        make("ppo-clip", {"samples": "policy", "clip": 0.2}),
        make("grpo", {"samples": "lists", "clip": 0.2}),
        make("kl-penalty", {"samples": "policy", "advantages": "batch", "penalty": 0.05}),
    ]


def test_there_are_twelve_scenarios():
    assert len({scenario.name for scenario in SCENARIOS}) == 12
    assert len({scenario.corruption for scenario in SCENARIOS}) == 4


def test_training_together_equals_one_run_at_a_time():
    methods = some_methods()
    replicas = [Replica(SCENARIOS[i], seed) for i in (1, 5, 7, 11) for seed in (3, 4)]
    together = train(SMALL, replicas, methods)
    for m, method in enumerate(methods):
        for r in (0, 3, 7):
            alone = weights_of(train_alone(SMALL, replicas[r], method))
            for stacked, single in zip(together.weights[m], alone, strict=True):
                torch.testing.assert_close(stacked[r : r + 1], single, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adpo-ema", {"beta": 1.0, "tau": 1.0, "decay": 0.9}),
        ("adpo-refresh", {"beta": 1.0, "tau": 1.0, "every": 2}),
        ("adpo-guarded", {"beta": 1.0, "tau_max": 4.0}),
        ("adpo-natural", {"target": "ranking", "tau": 4.0, "every": 2}),
        ("trpo", {"samples": "policy", "advantages": "group", "max_kl": 0.01}),
    ],
)
def test_a_run_does_not_depend_on_its_neighbours(name, settings):
    method = make(name, settings)
    replicas = [Replica(SCENARIOS[i], seed) for i in (2, 9) for seed in (5, 6)]
    together = train(SMALL, replicas, [make("sft-best", {}), method])
    alone = train(SMALL, replicas[3:], [method])
    for stacked, single in zip(together.weights[1], alone.weights[0], strict=True):
        torch.testing.assert_close(stacked[3:], single, rtol=1e-3, atol=1e-5)


def test_methods_of_a_seed_share_everything_but_the_method():
    worlds = Worlds(SMALL, [Replica(SCENARIOS[0], 7), Replica(SCENARIOS[9], 7), Replica(SCENARIOS[0], 8)])
    draws = worlds.draw()
    assert torch.equal(draws.contexts[0], draws.contexts[1])
    assert not torch.equal(draws.contexts[0], draws.contexts[2])
    assert torch.equal(draws.items[0], draws.items[1])
    again = Worlds(SMALL, [Replica(SCENARIOS[9], 7)]).draw()
    assert torch.equal(again.cauchy[0], draws.cauchy[1])


def test_each_corruption_does_what_it_says():
    protocol = replace(SMALL, contexts=4000)

    def observed(scenario):
        worlds = Worlds(protocol, [Replica(scenario, 0)])
        draws = worlds.draw()
        clean = worlds.clean_rewards(draws.contexts).gather(-1, draws.items)
        return draws, clean, worlds.observed(draws, draws.items)

    _, clean, seen = observed(CLEAN)
    assert torch.equal(clean, seen)
    assert clean.std().item() == pytest.approx(1, abs=0.15)
    _, clean, seen = observed(SCENARIOS[1])  # gaussian, medium: sd 1, a tenth of it ten times as wide
    noise = (seen - clean).flatten()
    assert noise.abs().median().item() == pytest.approx(0.6745 * 1.1, abs=0.08)
    assert (noise.abs() > 5).float().mean().item() == pytest.approx(0.1 * 0.617, abs=0.01)
    draws, _, _ = observed(SCENARIOS[5])  # shift, hard
    assert draws.contexts[0].mean(0).norm().item() == pytest.approx(3.0, abs=0.1)
    assert (draws.contexts[0] - draws.contexts[0].mean(0)).std().item() == pytest.approx(0.6, abs=0.02)
    _, clean, seen = observed(replace(SCENARIOS[8], noise=0.0))  # flips, hard
    flipped = (seen == -clean).all(-1)
    assert ((seen == clean).all(-1) | flipped).all()
    assert flipped.float().mean().item() == pytest.approx(0.3, abs=0.03)
    _, clean, seen = observed(SCENARIOS[11])  # cauchy, hard: the quartiles of a Cauchy are its scale
    assert (seen - clean).abs().median().item() == pytest.approx(1.5, abs=0.1)


def test_measures_of_known_policies():
    worlds = Worlds(SMALL, [Replica(CLEAN, 0)])
    zero = [torch.zeros_like(w) for w in fleet.initial_weights(SMALL, worlds)]
    uniform = Exam(worlds, zero).measure(zero)
    assert uniform.sampled.item() == pytest.approx(0.1)
    assert uniform.worst.item() == pytest.approx(0.1)
    assert uniform.entropy.item() == pytest.approx(torch.tensor(10.0).log().item())
    assert uniform.anchor_kl.item() == pytest.approx(0, abs=1e-6)
    assert uniform.regret.item() > 0.5


def surrogate():
    """Three runs with their expected reward as a loss, and the KL to where they are."""
    worlds = Worlds(SMALL, [Replica(CLEAN, seed) for seed in range(3)])
    weights = [w.clone() for w in fleet.initial_weights(SMALL, worlds)]
    contexts = worlds.draw().contexts
    old, truth = fleet.log_policy(weights, contexts), worlds.clean_rewards(contexts)

    def loss(w, runs=slice(None)):
        return -(fleet.log_policy(w, contexts[runs]).exp() * truth[runs]).sum(-1).mean(1)

    def kl(w, runs=slice(None)):
        return (old[runs].exp() * (old[runs] - fleet.log_policy(w, contexts[runs]))).sum(-1).mean(1)

    return weights, loss, kl


def test_the_natural_step_stays_in_its_region_and_improves_each_run():
    weights, loss, kl = surrogate()
    before = loss(weights)
    natural_step(weights, loss, kl, TrustRegion(max_kl=0.01))
    assert torch.all(loss(weights) < before - 1e-3)
    assert torch.all(kl(weights) <= 0.01)
    assert torch.all(kl(weights) > 0.001)


def test_the_natural_step_of_one_run_is_trpos():
    weights, loss, kl = surrogate()
    one = slice(1, 2)
    alone = [w[one].clone().requires_grad_() for w in weights]
    taken = trpo_step(alone, lambda: -loss(alone, one).sum(), lambda: kl(alone, one).sum(), max_kl=0.01)
    natural_step(weights, loss, kl, TrustRegion(max_kl=0.01))
    assert taken.accepted
    for mine, theirs in zip(weights, alone, strict=True):
        torch.testing.assert_close(mine[one], theirs.detach(), rtol=1e-4, atol=1e-6)


def test_every_grid_can_be_made():
    for name in GRID:
        for settings in grid(name):
            assert make(name, settings).settings == settings


def test_intervals_and_holm():
    found = interval([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.half == pytest.approx(3.1824 * 1.29099 / 2, rel=1e-4)  # t(0.975, 3) * sd / sqrt(4)
    assert paired([1.0, 2.0], [0.0, 1.0]) == (1.0, 0.0)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def final(scenario, methods, seeds, protocol):
    replicas = [Replica(scenario, seed) for seed in seeds]
    state = train(protocol, replicas, methods)
    exam = Exam(state.worlds, state.reference)
    return exam.measure(state.reference), {
        f"{m.name} {m.samples}": exam.measure(w) for m, w in zip(methods, state.weights, strict=True)
    }


ALL = [(name, next(grid(name))) for name in GRID]


def test_without_noise_every_method_learns():
    protocol = replace(Protocol(), iterations=60, test_contexts=500, held_out_lists=200)
    reference, found = final(CLEAN, [make(*pair) for pair in ALL], range(4), protocol)
    for name, measures in found.items():
        assert measures.greedy.mean() >= 4 / 10, name
        assert measures.sampled.mean() > reference.sampled.mean(), name


def test_with_half_the_lists_flipped_nothing_can_be_learnt():
    """The order carries no information: the best and the worst item are alike to every method."""
    protocol = replace(Protocol(), iterations=30, test_contexts=500, held_out_lists=200, reference_steps=0)
    _, found = final(UNLEARNABLE, [make(*pair) for pair in ALL], range(8), protocol)
    for name, measures in found.items():
        gap = interval((measures.sampled - measures.worst).tolist(), level=0.999)
        assert gap.low <= 0 <= gap.high, name


def test_methods_odd_in_the_reward_stay_at_the_reference_when_half_the_lists_are_flipped():
    """Every gradient meets its opposite as often: the reference is where they are at rest."""
    protocol = replace(Protocol(), iterations=30, test_contexts=500, held_out_lists=200)
    odd = [
        make("dpo-hard", {"beta": 0.1}),
        make("dpo-soft", {"beta": 0.1, "scale": 1.0}),
        make("adpo-pairwise", {"beta": 1.0, "tau": 1.0}),
        make("grpo", {"samples": "policy", "clip": 0.2}),
        make("ppo-clip", {"samples": "policy", "clip": 0.2}),
        make("kl-penalty", {"samples": "policy", "advantages": "batch", "penalty": 0.2}),
    ]
    reference, found = final(UNLEARNABLE, odd, range(8), protocol)
    assert (reference.sampled - reference.worst).mean() > 0.01  # it does know something
    for name, measures in found.items():
        for mine, theirs in ((measures.sampled, reference.sampled), (measures.worst, reference.worst)):
            change = interval((mine - theirs).tolist(), level=0.999)
            assert change.low <= 0 <= change.high, name
            assert abs(change.mean) < 0.02, name


def test_objectives_that_differ_in_tau_alone_share_a_call():
    """The same losses as one call each."""
    losses = [Groupwise(Objective(plackett_luce(), tau=tau)) for tau in (0.5, 2.0)]
    assert losses[0].kin == losses[1].kin != Groupwise(Objective(top1())).kin
    generator = torch.Generator().manual_seed(0)

    def batch(anchored):
        tables = [torch.randn(3, 4, 10, generator=generator).log_softmax(-1) for _ in range(3)]
        items = torch.rand(3, 4, 10, generator=generator).argsort(-1)[..., :6]
        rewards = torch.randn(3, 4, 6, generator=generator)
        return Batch(tables[0], tables[0], tables[1] if anchored else None, tables[2], items, rewards)

    batches = [batch(True), batch(False)]
    for alone, shared, mine in zip(losses, together(losses, batches), batches, strict=True):
        torch.testing.assert_close(alone(mine), shared)
        anchor = None if mine.log_anchor is None else mine.of(mine.log_anchor)
        for replica in range(3):
            expected = alone.objective.loss(
                mine.of(mine.log_policy)[replica],
                None if anchor is None else anchor[replica],
                rewards=mine.rewards[replica],
            )
            torch.testing.assert_close(shared[replica], expected)


def test_mass_on_the_popular_and_smeared_mass_are_two_measures():
    """A bad item with .95 of the reference: SFT keeps it, DPO drops it and smears, anchored ranking drops most."""
    found = {each["method"]: each for each in popular_but_wrong(Popular(), "bad", 0.95, [0], lambda _: None)}
    for each in found.values():
        assert each["wrong"] + each["best"] + each["smeared"] == pytest.approx(1, abs=1e-5)
    assert found["sft-best"]["wrong"] > 0.5
    assert found["dpo-hard"]["wrong"] < 0.05 < 0.5 < found["dpo-hard"]["smeared"]
    assert found["adpo-ranking"]["wrong"] < 0.3
