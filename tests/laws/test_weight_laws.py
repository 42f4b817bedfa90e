"""A weight per group: the mean over groups is sum(w * loss) / sum(w), in losses, coefficients and `exact`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adpo
from adpo.exact import backward
from adpo.exact import coefficients as row_coefficients
from draws import OBJECTIVES, groups

every_objective = pytest.mark.parametrize(("target", "divergence"), OBJECTIVES.values(), ids=OBJECTIVES.keys())
FEW = ("efron/cross_entropy", "boltzmann standardized/reverse_kl", "top1/wasserstein(1)", "teacher/alpha(0.5)")
few_objectives = pytest.mark.parametrize("name", FEW)
few = settings(max_examples=5)
REDUCTIONS = ("mean", "sum", "none")


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def at(g, rows):
    """The arguments of some of the groups, some of them more than once."""
    tables = {name: values[rows] for name, values in g.signals().items()}
    return {"logp": g.logp[rows], "anchor_logp": g.anchor_logp[rows], "mask": g.mask[rows], "tau": g.tau, **tables}


@every_objective
@few
@given(g=groups())
def test_weights_of_one_change_no_bit(target, divergence, g):
    objective, ones = adpo.Objective(target, divergence), torch.ones(len(g.logp))
    for reduction in REDUCTIONS:
        for method in (objective.loss, objective.coefficients):
            plain = method(g.logp, g.anchor_logp, reduction=reduction, **g.arguments())
            weighted = method(g.logp, g.anchor_logp, reduction=reduction, weights=ones, **g.arguments())
            assert torch.equal(plain, weighted)
    plain = objective.diagnostics(g.logp, g.anchor_logp, **g.arguments())
    assert torch.equal(
        torch.stack(plain),
        torch.stack(objective.diagnostics(g.logp, g.anchor_logp, weights=ones, **g.arguments())),
    )


@every_objective
@few
@given(g=groups(), data=st.data())
def test_a_weight_of_n_is_the_group_n_times_and_zero_is_the_group_left_out(target, divergence, g, data):
    objective = adpo.Objective(target, divergence)
    times = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(g.logp), max_size=len(g.logp))))
    rows = torch.arange(len(g.logp)).repeat_interleave(times)
    weighted, repeated = {**at(g, torch.arange(len(g.logp))), "weights": times}, at(g, rows)
    for reduction in ("mean", "sum"):
        close(objective.loss(reduction=reduction, **weighted), objective.loss(reduction=reduction, **repeated))
        together = torch.zeros_like(g.logp).index_add(
            0, rows, objective.coefficients(reduction=reduction, **repeated)
        )
        close(objective.coefficients(reduction=reduction, **weighted), together)
    close(torch.stack(objective.diagnostics(**weighted)), torch.stack(objective.diagnostics(**repeated)))


@few_objectives
@given(g=groups(), seed=st.integers(0, 1000))
def test_the_weighted_mean_by_its_formula_and_its_gradient(name, g, seed):
    objective = adpo.Objective(*OBJECTIVES[name])
    weights = torch.rand(len(g.logp), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    each = objective.loss(g.logp, g.anchor_logp, reduction="none", **g.arguments())
    total = weights[g.real].sum().clamp(min=1e-300)
    leaf = g.logp.clone().requires_grad_()
    loss = objective.loss(leaf, g.anchor_logp, weights=weights, **g.arguments())
    close(loss, (weights * each).sum() / total)
    loss.backward()
    close(objective.coefficients(g.logp, g.anchor_logp, weights=weights, **g.arguments()), leaf.grad, 1e-12)
    unreduced = objective.loss(g.logp, g.anchor_logp, weights=weights, reduction="none", **g.arguments())
    close(unreduced, weights * each)
    # Only ratios of weights matter to the mean.
    close(loss, objective.loss(g.logp, g.anchor_logp, weights=7 * weights, **g.arguments()))


@few_objectives
@few
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    piece=st.integers(1, 5),
    at_anchor=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_weighted_gradients_are_exact_under_any_split(name, sizes, piece, at_anchor, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=generator)]
    features, anchor = torch.randn(len(ids), 3, generator=generator).double(), torch.randn(len(ids)).double()
    rewards = torch.randint(3, (len(ids),), generator=generator).double()
    weights = torch.randint(3, (len(sizes),), generator=generator).double() * 1.5
    teacher = torch.randn(len(ids), generator=generator).double()
    parameters = torch.randn(3, generator=generator).double().requires_grad_()
    objective = adpo.Objective(*OBJECTIVES[name], tau=0.7)
    signals = {"rewards": rewards, "teacher_logp": teacher}

    def score(rows):
        return features[rows] @ parameters

    if at_anchor:
        anchor = score(torch.arange(len(ids))).detach()
    table, mask, index = adpo.from_flat(score(torch.arange(len(ids))), ids)
    tables = {n: adpo.to_table(v, index, tuple(mask.shape)) for n, v in {**signals, "anchor_logp": anchor}.items()}
    loss = objective.loss(table, mask=mask, weights=weights, **tables)
    (expected,) = torch.autograd.grad(loss, parameters)

    pieces = list(torch.randperm(len(ids), generator=generator).split(piece))
    result = backward(objective, score, pieces, ids, anchor, at_anchor=at_anchor, weights=weights, **signals)
    close(result.loss, loss.detach())
    close(parameters.grad if parameters.grad is not None else torch.zeros(3).double(), expected)
    assert torch.all(result.coefficients[weights[ids] == 0] == 0)
    flat = row_coefficients(
        objective, score(torch.arange(len(ids))).detach(), ids, anchor, weights=weights, **signals
    )
    close(flat.coefficients, result.coefficients)
    close(torch.stack(flat.diagnostics), torch.stack(result.diagnostics))


def test_groups_without_weight_cost_no_pass():
    trained = []

    def score(rows):
        trained.extend(rows.tolist())
        return logp[rows]

    logp, ids = torch.zeros(4, requires_grad=True), torch.tensor([0, 0, 1, 1])
    objective, rewards = adpo.Objective(adpo.boltzmann(1.0)), torch.tensor([1.0, 0.0, 1.0, 0.0])
    pieces, weights = [torch.arange(4)], torch.tensor([0, 1])
    result = backward(objective, score, pieces, ids, at_anchor=True, rewards=rewards, weights=weights)
    assert trained == [2, 3]
    assert result.rows_trained == 2
    assert result.diagnostics.live.item() == 1  # of the groups that count


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_what_is_rounding_does_not_depend_on_the_weights(scale):
    """Tied groups at the anchor stay without gradient under huge weights, others keep theirs under tiny ones."""
    objective, ids = adpo.Objective(adpo.boltzmann(0.7)), torch.tensor([0, 0, 0, 1, 1, 1])
    rewards, logp = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 2.0]), torch.randn(6)
    for weights in (None, torch.full((2,), scale)):
        result = row_coefficients(objective, logp, ids, logp, rewards=rewards, weights=weights)
        assert torch.all(result.coefficients[:3] == 0)
        assert torch.all(result.coefficients[3:].abs() > 0.01)
        assert result.diagnostics.live.item() == 0.5


def test_without_any_weight_there_is_no_loss():
    objective, rewards = adpo.Objective(adpo.plackett_luce()), torch.tensor([[1.0, 0.0]])
    given = {"rewards": rewards, "weights": torch.zeros(1)}
    assert objective.loss(torch.zeros(1, 2), **given).item() == 0
    assert torch.equal(objective.coefficients(torch.zeros(1, 2), **given), torch.zeros(1, 2))
    rows = {"rewards": rewards[0], "weights": torch.zeros(1)}
    result = row_coefficients(objective, torch.zeros(2), torch.tensor([0, 0]), None, **rows)
    assert (result.loss.item(), result.coefficients.tolist()) == (0, [0, 0])


def test_padding_groups_have_no_weight():
    mask, weights = torch.tensor([[True, True], [False, False]]), torch.tensor([2.0, torch.nan])
    objective, rewards = adpo.Objective(adpo.top1()), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    loss = objective.loss(torch.zeros(2, 2), mask=mask, rewards=rewards, weights=weights)
    assert loss.item() == pytest.approx(torch.tensor(2.0).log().item())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.tensor([1.0, -1.0]), "weights at group 1 is -1.0; expected a weight of at least 0"),
        (torch.tensor([1.0, torch.inf]), "weights at group 1 is inf; expected a finite value"),
        (torch.ones(2, 2), "weights must be [2], one per group; got float32 [2, 2]"),
    ],
)
def test_weights_that_are_none_are_refused_in_one_line(weights, message):
    objective, rewards = adpo.Objective(adpo.top1()), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    with pytest.raises(ValueError, match=r".") as error:
        objective.loss(torch.zeros(2, 2), rewards=rewards, weights=weights)
    assert message in str(error.value)
    if weights.ndim == 1:
        flat = {"rewards": rewards.flatten(), "weights": weights}
        with pytest.raises(ValueError, match="weights at group 1"):
            row_coefficients(objective, torch.zeros(4), torch.tensor([0, 0, 1, 1]), None, **flat)


def test_bad_weights_under_torch_func_are_nan_in_their_group_alone():
    objective, rewards = adpo.Objective(adpo.top1()), torch.tensor([[1.0, 0.0], [0.0, 1.0]])

    def one(logp, weight, rewards):
        return objective.loss(logp[None], rewards=rewards[None], weights=weight[None], reduction="sum")

    weights = torch.tensor([2.0, -1.0])
    losses = torch.func.vmap(one)(torch.zeros(2, 2), weights, rewards)
    assert losses.isnan().tolist() == [False, True]
    assert losses[0].item() == pytest.approx(2 * torch.tensor(2.0).log().item())
