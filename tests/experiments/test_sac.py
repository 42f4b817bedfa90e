"""Soft actor-critic: one update is that of stable-baselines3, and training goes on where it was."""

import pytest
import torch

pytest.importorskip("gymnasium")

from adpo.experiments.distill import teachers, training
from adpo.experiments.distill.actor import Actor, Gaussian, load_actor, save_actor
from adpo.experiments.distill.sac import Agent, Recipe, Transitions, updates

CPU = torch.device("cpu")
SMALL = Recipe(hidden=16, batch=32)


def test_one_update_is_that_of_stable_baselines3():
    sb3 = pytest.importorskip("stable_baselines3")
    theirs = sb3.SAC(
        "MlpPolicy", "Pendulum-v1", policy_kwargs={"net_arch": [16, 16]}, batch_size=32, seed=0, device="cpu"
    )
    theirs._setup_learn(1)
    world = theirs.get_env()
    state = world.reset()
    for _ in range(64):
        action = world.action_space.sample()[None]
        after, reward, done, info = world.step(action)
        theirs._store_transition(theirs.replay_buffer, action / 2, after, reward, done, info)
        state = after
    assert state.shape == (1, 3)
    ours = Agent(3, 1, SMALL, CPU)
    copy_from_sb3(ours, theirs)
    drawn = theirs.replay_buffer.sample(32)
    theirs.replay_buffer.sample = lambda *_, **__: drawn
    torch.manual_seed(3)
    noise, next_noise = torch.normal(torch.zeros(32, 1), 1.0), torch.normal(torch.zeros(32, 1), 1.0)
    torch.manual_seed(3)
    theirs.train(gradient_steps=1, batch_size=32)
    rows = {"state": drawn.observations, "action": drawn.actions, "next_state": drawn.next_observations}
    rows |= {"reward": drawn.rewards.squeeze(1), "ended": drawn.dones.squeeze(1)}
    before = [value.detach().clone() for value in ours.actor.parameters()]
    ours.update(rows, noise, next_noise)
    expected = Agent(3, 1, SMALL, CPU)
    copy_from_sb3(expected, theirs)
    for mine, other in zip(everything(ours), everything(expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)
    assert not any(torch.equal(now, was) for now, was in zip(ours.actor.parameters(), before, strict=True))


def everything(agent):
    return [*agent.actor.parameters(), *agent.critics, *agent.slow, agent.log_alpha]


@torch.no_grad()
def copy_from_sb3(agent, theirs):
    actor = theirs.policy.actor
    parts = [actor.latent_pi[0], actor.latent_pi[2], actor.mu, actor.log_std]
    mine = [agent.actor.body[0], agent.actor.body[2], agent.actor.mean, agent.actor.log_std]
    for to, of in zip(mine, parts, strict=True):
        to.load_state_dict(of.state_dict())
    for weights, critic in ((agent.critics, theirs.critic), (agent.slow, theirs.critic_target)):
        for number, net in enumerate((critic.qf0, critic.qf1)):
            for layer, place in enumerate((0, 2, 4)):
                weights[2 * layer][number] = net[place].weight.T
                weights[2 * layer + 1][number] = net[place].bias
    agent.log_alpha.copy_(theirs.log_ent_coef.squeeze())


def test_densities_of_squashed_gaussians():
    policy = Gaussian(torch.tensor([[0.3, -0.5]]), torch.tensor([[-0.2, 0.1]]))
    u = torch.tensor([[0.7, -1.5]])
    normal = torch.distributions.Normal(policy.mean, policy.log_std.exp())
    squashed = torch.distributions.TransformedDistribution(
        normal, [torch.distributions.transforms.TanhTransform(cache_size=1)]
    )
    torch.testing.assert_close(policy.logp(u), normal.log_prob(u).sum(-1))
    torch.testing.assert_close(policy.squashed_logp(u), squashed.log_prob(torch.tanh(u)).sum(-1))
    other = Gaussian(torch.tensor([[0.0, 0.4]]), torch.tensor([[0.3, -0.6]]))
    expected = torch.distributions.kl_divergence(
        normal, torch.distributions.Normal(other.mean, other.log_std.exp())
    ).sum(-1)
    torch.testing.assert_close(policy.kl(other), expected)
    assert float(policy.kl(policy)) == 0


def test_the_latest_transitions_are_kept():
    kept = Transitions(1, 1, 5, CPU)
    for start in (0, 3, 6):
        value = torch.arange(start, start + 3.0)
        kept.add(
            state=value[:, None], action=value[:, None], reward=value, next_state=value[:, None], ended=0 * value
        )
    assert kept.latest(10)["reward"].tolist() == [4, 5, 6, 7, 8]
    assert int(kept.filled) == 5
    drawn = kept.draw(1000)
    assert set(drawn["reward"].tolist()) == {4, 5, 6, 7, 8}
    assert torch.equal(drawn["state"][:, 0], drawn["reward"])


def small_plan(**options):
    return training.Plan(
        "Pendulum-v1",
        **{"steps": 400, "side_by_side": 4, "exam_every": 200, "exam_episodes": 2, **options},
        recipe=Recipe(hidden=16, batch=32, random_steps=100, kept=1000),
    )


def test_training_goes_on_where_it_was(tmp_path):
    first = training.Training(small_plan(), tmp_path, CPU)
    assert first.run(None, lambda _: None).steps == 400
    later = training.Training(small_plan(steps=480), tmp_path, CPU)
    later.load()
    for mine, other in zip(everything(later.agent), everything(first.agent), strict=True):
        assert torch.equal(mine, other)
    states = [optimizer.state_dict()["state"] for optimizer in later.agent.optimizers]
    for mine, other in zip(
        states, (optimizer.state_dict()["state"] for optimizer in first.agent.optimizers), strict=True
    ):
        assert all(torch.equal(mine[i][name], other[i][name]) for i in other for name in other[i])
    assert int(later.transitions.filled) == 400
    assert later.run(None, lambda _: None).steps == 480
    assert len(later.progress.exams) == 2


def test_no_time_no_steps(tmp_path):
    assert training.Training(small_plan(), tmp_path, CPU).run(0, lambda _: None).steps == 0


def test_actors_are_kept_with_their_card(tmp_path):
    actor = Actor(3, 2, 8)
    save_actor(actor, tmp_path / "a.safetensors", {"steps": 5})
    found, card = load_actor(tmp_path / "a.safetensors")
    states = torch.randn(4, 3)
    assert torch.equal(found(states).mean, actor(states).mean)
    assert card == {"steps": 5}
    (tmp_path / "b.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="holds no actor"):
        load_actor(tmp_path / "b.safetensors")


@pytest.mark.slow
def test_a_small_task_is_solved(tmp_path):
    plan = small_plan(steps=8000, exam_every=1000, exam_episodes=10)
    plan = training.Plan(
        plan.name,
        plan.steps,
        plan.side_by_side,
        exam_every=1000,
        recipe=Recipe(hidden=64, batch=128, random_steps=500, learning_rate=1e-3),
    )
    found = training.Training(plan, tmp_path, CPU)
    found.run(None, lambda _: None)
    assert found.best_return > -250  # untrained: below -1000


def test_updates_are_counted():
    agent, kept = Agent(2, 1, SMALL, CPU), Transitions(2, 1, 10, CPU)
    kept.add(
        state=torch.ones(4, 2),
        action=torch.zeros(4, 1),
        reward=torch.ones(4),
        next_state=torch.ones(4, 2),
        ended=torch.zeros(4),
    )
    updates(agent, kept, 3)()
    assert {int(state["step"]) for optimizer in agent.optimizers for state in optimizer.state.values()} == {3}


def test_a_teacher_comes_with_its_card(tmp_path, monkeypatch):
    monkeypatch.setitem(teachers.PLANS, "Pendulum-v1", small_plan())
    card = teachers.train_teacher("Pendulum-v1", tmp_path, False, lambda _: None, episodes=4)
    actor, known = teachers.load_teacher("Pendulum-v1", tmp_path)
    assert known == card
    assert (card["steps"], card["episodes"]) == (400, 4)
    assert card["deterministic"]["lowest"] <= card["deterministic"]["mean"] <= card["deterministic"]["highest"]
    assert (
        teachers.examined(actor, "Pendulum-v1", 4)["stochastic"] == card["stochastic"]
    )  # the same episodes again
    with pytest.raises(ValueError, match="is there already: add --resume"):
        teachers.train_teacher("Pendulum-v1", tmp_path, False, lambda _: None)
    with pytest.raises(ValueError, match=r"no teacher for 'Walker2d-v5' in .*; there are: Pendulum-v1"):
        teachers.load_teacher("Walker2d-v5", tmp_path)
