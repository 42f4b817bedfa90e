"""The gradient of the whole-group objective, whatever the split."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adpo
import forked
from adpo.exact import Parallel, backward, coefficients
from exact_problem import OBJECTIVES, Problem


def gradients(problem):
    return [parameter.grad for parameter in problem.model.parameters()]


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=25)
@given(seed=st.integers(0, 1000), size=st.integers(1, 25), groups=st.integers(1, 6))
def test_any_partition_gives_the_one_pass_gradient(name, seed, size, groups):
    problem = Problem(seed, groups)
    loss, expected = problem.one_pass(OBJECTIVES[name], problem.anchor_logp)
    result = backward(
        OBJECTIVES[name],
        problem.score,
        problem.partition(size, seed),
        problem.ids,
        problem.anchor_logp,
        rewards=problem.rewards,
    )
    torch.testing.assert_close(result.loss, loss)
    seen = [torch.zeros_like(e) if g is None else g for g, e in zip(gradients(problem), expected, strict=True)]
    torch.testing.assert_close(seen, list(expected))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_at_the_anchor_nothing_is_scored_and_dead_groups_cost_nothing(name):
    problem = Problem(4, groups=8)
    everything = torch.arange(len(problem.ids))
    anchor = problem.score(everything).detach()
    _, expected = problem.one_pass(OBJECTIVES[name], anchor)
    result = backward(
        OBJECTIVES[name],
        problem.score,
        problem.partition(3),
        problem.ids,
        None,
        at_anchor=True,
        rewards=problem.rewards,
    )
    torch.testing.assert_close(gradients(problem), list(expected))
    tied = sum(
        int((problem.ids == i).sum())
        for i in problem.ids.unique()
        if problem.rewards[problem.ids == i].unique().numel() == 1
    )
    assert tied > 0
    assert result.rows_scored == 0
    assert result.rows_trained <= len(problem.ids) - tied
    assert result.logp.isnan().sum() >= tied


def test_whole_groups_in_a_micro_batch_need_no_scoring_pass():
    problem = Problem(1, groups=6)
    whole = [(problem.ids == i).nonzero().flatten() for i in problem.ids.unique()]
    objective = OBJECTIVES["reverse"]
    loss, expected = problem.one_pass(objective, problem.anchor_logp)
    seen = []

    def score(rows):
        seen.append(len(rows))
        return problem.score(rows)

    result = backward(objective, score, whole, problem.ids, problem.anchor_logp, rewards=problem.rewards)
    torch.testing.assert_close(gradients(problem), list(expected))
    torch.testing.assert_close(result.loss, loss)
    assert result.rows_scored == 0
    assert sum(seen) == len(problem.ids)


def test_whole_and_cut_groups_may_be_mixed():
    problem = Problem(3, groups=6)
    ids = problem.ids.unique()
    whole = [(problem.ids == i).nonzero().flatten() for i in ids]
    big = max(whole, key=len)
    rest = torch.cat([rows for rows in whole if rows is not big])
    assert len(big) > 1
    objective = OBJECTIVES["boltzmann"]
    _, expected = problem.one_pass(objective, problem.anchor_logp)
    result = backward(
        objective,
        problem.score,
        [big[:1], rest, big[1:]],
        problem.ids,
        problem.anchor_logp,
        rewards=problem.rewards,
    )
    torch.testing.assert_close(gradients(problem), list(expected))
    assert result.rows_scored == len(big)


def test_a_temperature_and_a_label_per_group():
    problem = Problem(2, groups=5)
    table, mask, _ = adpo.from_flat(problem.anchor_logp, problem.ids)
    logp, _, _ = adpo.from_flat(problem.score(torch.arange(len(problem.ids))), problem.ids)
    labels = mask.sum(1) - 1
    objective = adpo.Objective(adpo.one_hot())
    loss = objective.loss(logp, table, mask=mask, tau=problem.tau, labels=labels)
    expected = torch.autograd.grad(loss, list(problem.model.parameters()))
    for partition in (problem.partition(1), problem.partition(4), problem.partition(100)):
        problem.model.zero_grad()
        backward(
            objective, problem.score, partition, problem.ids, problem.anchor_logp, tau=problem.tau, labels=labels
        )
        torch.testing.assert_close(gradients(problem), list(expected))


def test_gradients_accumulate_as_backward_does():
    problem = Problem()
    _, expected = problem.one_pass(OBJECTIVES["ranking"], problem.anchor_logp)
    for _ in range(2):
        backward(
            OBJECTIVES["ranking"],
            problem.score,
            problem.partition(2),
            problem.ids,
            problem.anchor_logp,
            rewards=problem.rewards,
        )
    torch.testing.assert_close(gradients(problem), [2 * gradient for gradient in expected])


@pytest.mark.parametrize(
    "batches",
    [[[0, 1]], [[0, 1, 2], [2]], [[0, 1, 3]], [[]], []],
    ids=["short", "twice", "beyond", "empty", "none"],
)
def test_a_partition_that_is_none_is_refused_before_any_work(batches):
    def score(rows):
        raise AssertionError("scored")

    with pytest.raises(ValueError, match="micro_batches must name each of the 3 rows once"):
        backward(
            OBJECTIVES["ranking"],
            score,
            [torch.tensor(batch, dtype=torch.long) for batch in batches],
            torch.tensor([0, 0, 0]),
            None,
            rewards=torch.zeros(3),
        )


def test_a_target_that_reads_the_anchor_needs_it_at_the_anchor_too():
    problem = Problem()
    objective = adpo.Objective(adpo.boltzmann(1.0, reference=True))
    with pytest.raises(ValueError, match="looks at the anchor"):
        backward(
            objective,
            problem.score,
            problem.partition(9),
            problem.ids,
            None,
            at_anchor=True,
            rewards=problem.rewards,
        )


def refused(**changes):
    problem = Problem()
    arguments = {
        "objective": OBJECTIVES["ranking"],
        "score": problem.score,
        "micro_batches": problem.partition(3),
        "group_ids": problem.ids,
        "anchor_logp": problem.anchor_logp,
        "rewards": problem.rewards,
        **changes,
    }
    return backward(**arguments)


class Wrapper(torch.nn.Linear):
    """What a data-parallel wrapper looks like from outside."""

    broadcast_buffers = True

    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("frequencies", torch.ones(1))

    def no_sync(self):
        return adpo.exact.nullcontext()


def not_a_number(rows):
    return torch.where(rows == 5, torch.nan, 0.0)


REFUSED = {
    "the log-probability of row 5 (group ": lambda: refused(score=not_a_number),
    "score must return one value for each of ": lambda: refused(score=lambda rows: torch.zeros(len(rows), 2)),
    "rewards must be [rows] = ": lambda: refused(rewards=torch.zeros(3)),
    "anchor_logp must be [rows] = ": lambda: refused(anchor_logp=torch.zeros(3)),
    "labels must be [groups] = [5]; got [2]": lambda: refused(labels=torch.zeros(2)),
    "leave padding rows out": lambda: refused(mask=torch.ones(3)),
    "without averaging=True": lambda: refused(parallel=Parallel(no_sync=Wrapper().no_sync)),
    "build DistributedDataParallel with broadcast_buffers=False": lambda: refused(
        parallel=Parallel(no_sync=Wrapper().no_sync, averaging=True)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_go_wrong_silently_is_refused(message):
    with pytest.raises((ValueError, TypeError)) as error:
        REFUSED[message]()
    assert message in str(error.value)


def test_a_single_temperature_tensor_an_absent_signal_and_integer_rewards_are_understood():
    problem = Problem()
    one = refused(tau=torch.tensor([0.4]), ranks=None, rewards=problem.rewards.long())
    torch.testing.assert_close(one.loss, refused(tau=0.4).loss)
    torch.testing.assert_close(one.coefficients, refused(tau=0.4).coefficients)


def test_the_diagnostics_are_those_of_the_whole_groups():
    problem = Problem(3, groups=6)
    objective = OBJECTIVES["boltzmann"]
    logp, mask, index = adpo.from_flat(problem.score(torch.arange(len(problem.ids))).detach(), problem.ids)
    tables = {
        name: adpo.to_table(values, index, tuple(mask.shape))
        for name, values in {"anchor_logp": problem.anchor_logp, "rewards": problem.rewards}.items()
    }
    expected = objective.diagnostics(logp, mask=mask, **tables)
    for size in (1, 3, 100):
        found = backward(
            objective,
            problem.score,
            problem.partition(size),
            problem.ids,
            problem.anchor_logp,
            rewards=problem.rewards,
        ).diagnostics
        torch.testing.assert_close(list(found), list(expected))


def run_two_processes(tmp_path, *arguments):
    out = tmp_path / "gradients.pt"
    done = forked.run_two(Path(__file__).with_name("exact_problem.py"), *arguments, out, timeout=120)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(
    ("name", "at_anchor", "wrapped", "per_group"),
    [
        ("boltzmann", 0, 0, 0),
        ("ranking", 0, 1, 1),
        pytest.param("reverse", 0, 1, 0, marks=pytest.mark.slow),
        ("ranking", 1, 1, 0),
        ("boltzmann", 1, 0, 1),
    ],
)
def test_groups_that_straddle_two_processes(tmp_path, name, at_anchor, wrapped, per_group):
    results = run_two_processes(tmp_path, name, at_anchor, wrapped, per_group, "straddling")
    problem = Problem(groups=6)
    everything = torch.arange(len(problem.ids))
    anchor = problem.score(everything).detach() if at_anchor else problem.anchor_logp
    # The candidates of a group count in the order of ranks: the loss does not care, tau and weights are by id.
    extra = {"tau": problem.tau, "weights": problem.weights} if per_group else {}
    loss, expected = problem.one_pass(OBJECTIVES[name], anchor, **extra)
    for found in results:
        torch.testing.assert_close(found["gradients"], list(expected))
        torch.testing.assert_close(found["loss"], loss)
        if at_anchor:
            assert found["scored"] == 0


@pytest.mark.parametrize("share", ["none", "dead", "whole"])
@pytest.mark.parametrize("wrapped", [0, 1])
def test_ranks_with_nothing_to_do_or_only_whole_groups(tmp_path, share, wrapped):
    """Rank 0 has no rows, or only tied groups, or only whole groups, while rank 1 has its groups cut."""
    results = run_two_processes(tmp_path, "ranking", 0, wrapped, 0, share)
    problem = Problem(groups=6)
    loss, expected = problem.one_pass(OBJECTIVES["ranking"], problem.anchor_logp)
    for found in results:
        torch.testing.assert_close(found["gradients"], list(expected))
        torch.testing.assert_close(found["loss"], loss)
    assert results[0]["scored"] == 0


def test_coefficients_of_rows_are_those_of_the_table():
    objective = adpo.presets.anchored_ranking()
    generator = torch.Generator().manual_seed(0)
    logp, anchor, rewards = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    order = torch.randperm(12, generator=generator)
    ids = torch.arange(3).repeat_interleave(4)[order]
    flat = [values.reshape(-1)[order] for values in (logp, anchor, rewards)]
    found = coefficients(objective, flat[0], ids, flat[1], rewards=flat[2])
    table = objective.coefficients(logp, anchor, rewards=rewards)
    torch.testing.assert_close(found.coefficients, table.reshape(-1)[order])
    torch.testing.assert_close(found.loss, objective.loss(logp, anchor, rewards=rewards))


def test_former_arguments_still_work():
    """For one version, with a warning that says what to write; they reach what they are for."""
    problem, losses = Problem(), []
    given = (OBJECTIVES["ranking"], problem.score, problem.partition(3), problem.ids)
    with pytest.warns(DeprecationWarning, match=r"parallel=exact\.Parallel\(back_propagate="):
        backward(*given, back_propagate=losses.append, at_anchor=True, rewards=problem.rewards)
    assert all(gradient is None for gradient in gradients(problem))
    sum(losses).backward()
    found = [gradient.clone() for gradient in gradients(problem)]
    problem.model.zero_grad()
    backward(*given, parallel=Parallel(), at_anchor=True, rewards=problem.rewards)
    assert found[0].any()
    torch.testing.assert_close(found, gradients(problem))
