"""Objectives under `torch.func`, `torch.compile`, in inference mode: the same numbers, and NaN for bad input."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import adpo
from draws import OBJECTIVES

every = pytest.mark.parametrize("name", OBJECTIVES)
LOGP, ANCHOR, TEACHER = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SIGNALS = {
    "rewards": torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 1], [3, 2, 1, 0]], dtype=torch.float64),
    "teacher_logp": TEACHER,
    "labels": torch.tensor([0, 1, 2]),
    "q": torch.softmax(TEACHER, 1),
}
MASK = torch.tensor([[True, True, True, True], [True, True, False, True], [True, True, True, True]])


@every
def test_what_is_made_in_inference_mode_may_be_used_outside(name):
    objective, leaf = adpo.Objective(*OBJECTIVES[name]), LOGP.clone().requires_grad_()
    given = {**SIGNALS, "q": SIGNALS["q"] * MASK / (SIGNALS["q"] * MASK).sum(1, keepdim=True)}
    given |= {"mask": MASK, "anchor_logp": ANCHOR, "tau": torch.ones(3, dtype=torch.float64)}
    with torch.inference_mode():
        inferred = {name: values.clone() for name, values in given.items()}
    loss = objective.loss(leaf, **inferred)
    loss.backward()
    assert torch.equal(loss, objective.loss(LOGP, **given))
    assert torch.equal(objective.coefficients(LOGP, **inferred), leaf.grad)


@every
def test_coefficients_under_vmap(name):
    objective = adpo.Objective(*OBJECTIVES[name])

    def one(logp, anchor, signals):
        return objective.coefficients(logp[None], anchor[None], **{n: v[None] for n, v in signals.items()})[0]

    together = torch.func.vmap(one)(LOGP, ANCHOR, SIGNALS)
    torch.testing.assert_close(together, objective.coefficients(LOGP, ANCHOR, reduction="sum", **SIGNALS))


COMPILED = [
    "boltzmann/cross_entropy",
    "efron/cross_entropy",
    "breslow/forward_kl",
    "efron smoothed/reverse_kl",
    "kde/reverse_kl",
    "top1/wasserstein(1)",
    "soft/alpha(2)",
    "one_hot/cross_entropy",
]


@pytest.mark.parametrize("name", COMPILED)
def test_coefficients_in_one_graph(name):
    objective = adpo.Objective(*OBJECTIVES[name])
    compiled = torch.compile(
        lambda logp, anchor, signals: objective.coefficients(logp, anchor, **signals),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(LOGP, ANCHOR, SIGNALS), objective.coefficients(LOGP, ANCHOR, **SIGNALS))


def test_a_tau_that_changes_is_compiled_once_more_and_then_never():
    objective, counter = adpo.presets.adpo(), CompileCounter()
    compiled = torch.compile(
        lambda logp, tau: objective.loss(logp, ANCHOR, tau=tau, rewards=SIGNALS["rewards"]),
        fullgraph=True,
        backend=counter,
    )
    for tau in (1.0, 0.5, 0.7, 2.0, 3.1, 0.01):
        expected = objective.loss(LOGP, ANCHOR, tau=tau, rewards=SIGNALS["rewards"])
        torch.testing.assert_close(compiled(LOGP, tau), expected)
    assert counter.frame_count == 2  # for the first number, then for any
    with pytest.raises(Exception, match="tau must be a positive finite number"):
        compiled(LOGP, -1.0)


def spoiled(name, value):
    """The tables with one bad cell, in the middle group."""
    table = {**SIGNALS, "anchor_logp": ANCHOR, "logp": LOGP, "tau": torch.ones(3, dtype=torch.float64)}
    bad = table[name].clone()
    bad[(1,) if bad.ndim == 1 else (1, 2)] = value
    return {**table, name: bad}


NAN, INF = float("nan"), float("inf")
BAD = [
    *((target, "rewards", NAN) for target in ("boltzmann", "kde", "top1", "efron", "breslow smoothed")),
    ("efron", "rewards", INF),
    ("boltzmann", "logp", NAN),
    ("efron", "logp", -INF),
    ("boltzmann", "anchor_logp", INF),
    ("efron", "anchor_logp", NAN),
    ("boltzmann", "tau", -1.0),
    ("efron", "tau", 0.0),
    ("top1", "tau", NAN),
    ("one_hot", "labels", -100),
    ("one_hot smoothed", "labels", 4),
    ("soft", "q", -0.1),
    ("soft", "q", 7.0),
    ("teacher", "teacher_logp", NAN),
]


@pytest.mark.parametrize("divergence", ["cross_entropy", "alpha(0.5)", "wasserstein(1)"])
@pytest.mark.parametrize(("target", "name", "value"), BAD, ids=lambda x: str(x))
def test_bad_input_is_refused_or_where_it_cannot_be_is_nan_for_its_group_alone(target, name, value, divergence):
    objective, table = adpo.Objective(*OBJECTIVES[f"{target}/{divergence}"]), spoiled(name, value)
    with pytest.raises(ValueError, match=f"{name} at group 1|sum of q at group 1"):
        objective.loss(**table)

    def loss(row):
        return objective.loss(**{n: v[None] for n, v in row.items()})

    def slope(row):
        return objective.coefficients(**{n: v[None] for n, v in row.items()})[0]

    def through(row):
        return torch.func.grad(lambda x: loss({**row, "logp": x}))(row["logp"])

    for one in (loss, slope, through):
        found = torch.func.vmap(one)(table).isnan().view(3, -1)
        assert found.all(1).tolist() == found.any(1).tolist() == [False, True, False]


def test_a_target_without_mass_where_it_needs_some_is_nan_for_its_group_alone():
    """The divergence is infinite there; its slope would be infinite in some cells and plausible in others."""
    objective, q = adpo.Objective(adpo.targets.soft(), adpo.reverse_kl), SIGNALS["q"].clone()
    q[1] = torch.tensor([0.5, 0.5, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"the target at group 1, candidate 2 is .* expected mass everywhere"):
        objective.loss(LOGP, None, q=q)
    loss = torch.func.vmap(lambda row, q: objective.loss(row[None], None, q=q[None]))(LOGP, q)
    c = torch.func.vmap(lambda row, q: objective.coefficients(row[None], None, q=q[None])[0])(LOGP, q)
    assert loss.isnan().tolist() == c.isnan().all(1).tolist() == c.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(("target", "name", "value"), [BAD[3], BAD[10], BAD[13], BAD[16]], ids=lambda x: str(x))
def test_bad_input_is_nan_in_compiled_code(target, name, value):
    objective, table = adpo.Objective(*OBJECTIVES[f"{target}/cross_entropy"]), spoiled(name, value)

    def both(table):
        each = objective.loss(**table, reduction="none")
        return objective.loss(**table), each, objective.coefficients(**table), objective.diagnostics(**table)

    loss, each, c, diagnostics = torch.compile(both, fullgraph=True, backend="aot_eager")(table)
    assert loss.isnan()
    assert each.isnan().tolist() == c.isnan().all(1).tolist() == c.isnan().any(1).tolist() == [False, True, False]
    assert torch.stack(list(diagnostics)).isnan().all()


def test_masked_cells_may_hold_anything_there_too():
    objective, mask = adpo.presets.anchored_ranking(), MASK.clone()
    table = spoiled("rewards", NAN)
    compiled = torch.compile(
        lambda table: objective.coefficients(**table, mask=mask), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(table), objective.coefficients(**table, mask=mask))


@every
def test_no_groups_have_no_loss(name):
    objective = adpo.Objective(*OBJECTIVES[name])
    for k in (1, 4):
        empty = {n: v[:0] if v.ndim == 1 else v[:0, :k] for n, v in SIGNALS.items()}
        leaf = LOGP[:0, :k].clone().requires_grad_()
        loss = objective.loss(leaf, None, **empty)
        loss.backward()
        assert loss.item() == 0
        assert objective.coefficients(leaf, None, **empty).shape == (0, k)
        assert [value.item() for value in objective.diagnostics(leaf, None, **empty)] == [0] * 6
