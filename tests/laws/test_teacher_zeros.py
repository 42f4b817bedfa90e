"""A teacher of -inf: a candidate without mass, for every divergence that bears it, refused in a line elsewhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adpo
from adpo.core.targets import soft, teacher
from draws import DIVERGENCES

BEAR_ZEROS = [divergence for divergence in DIVERGENCES if divergence.finite_at_zeros]
INFINITE = [divergence for divergence in DIVERGENCES if not divergence.finite_at_zeros]
signals_of = pytest.mark.parametrize("anchored", [False, True])


def drawn(seed, groups=3, k=4):
    """Log-probabilities, an anchor and a teacher that gives some candidates of every group no mass."""
    generator = torch.Generator().manual_seed(seed)
    logp, anchor, given = torch.randn(3, groups, k, generator=generator, dtype=torch.float64)
    none = torch.rand(groups, k, generator=generator) < 0.5
    none[:, 0] = False
    return 3 * logp, anchor, torch.where(none, -torch.inf, given)


@pytest.mark.parametrize("divergence", BEAR_ZEROS, ids=str)
@signals_of
@given(seed=st.integers(0, 1000))
def test_no_mass_is_the_limit_of_little_mass_with_finite_derivatives(divergence, anchored, seed):
    logp, anchor, given = drawn(seed)
    places = torch.arange(4.0).expand(3, 4)
    objective, leaf = adpo.Objective(teacher(anchored=anchored), divergence, 0.8), logp.clone().requires_grad_()
    loss = objective.loss(leaf, anchor, teacher_logp=given, positions=places)
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), leaf)
    assert torch.isfinite(loss)
    assert torch.isfinite(slope).all()
    assert torch.isfinite(curvature).all()
    found = objective.coefficients(logp, anchor, teacher_logp=given, positions=places)
    torch.testing.assert_close(found, slope)
    little = torch.where(given == -torch.inf, -2000.0, given)
    near = objective.coefficients(logp, anchor, teacher_logp=little, positions=places)
    torch.testing.assert_close(found, near, rtol=1e-6, atol=1e-9)
    diagnostics = objective.diagnostics(logp, anchor, teacher_logp=given, positions=places)
    assert torch.isfinite(torch.stack(diagnostics)).all()


@pytest.mark.parametrize("divergence", BEAR_ZEROS, ids=str)
def test_it_is_the_soft_target_with_zeros(divergence):
    logp, anchor, given = drawn(7)
    places = torch.arange(4.0).expand(3, 4)
    ours = adpo.Objective(teacher(), divergence).loss(logp, anchor, teacher_logp=given, positions=places)
    theirs = adpo.Objective(soft(), divergence)
    torch.testing.assert_close(ours, theirs.loss(logp, anchor, q=torch.softmax(given, 1), positions=places))


@pytest.mark.parametrize("divergence", INFINITE, ids=str)
@signals_of
def test_a_divergence_that_is_infinite_there_refuses_in_one_line(divergence, anchored):
    logp, anchor, given = drawn(3)
    objective = adpo.Objective(teacher(anchored=anchored), divergence)
    with pytest.raises(
        ValueError, match=f"the target at group .* expected mass everywhere for .*{divergence.name[:5]}"
    ) as e:
        objective.loss(logp, anchor, teacher_logp=given)
    assert "\n" not in str(e.value)
    bounded = torch.where(given == -torch.inf, -5.0, given)
    assert torch.isfinite(objective.loss(logp, anchor, teacher_logp=bounded))

    def one(logp, given):
        return objective.coefficients(
            logp[None], None if not anchored else 0 * logp[None], teacher_logp=given[None]
        )[0]

    mixed = torch.where(torch.tensor([[True], [False], [True]]), bounded, given)
    mixed[1, 1] = -torch.inf
    assert torch.func.vmap(one)(logp, mixed).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("rubbish", [torch.inf, torch.nan])
def test_other_values_that_are_not_finite_are_refused(rubbish):
    given = torch.tensor([[0.0, rubbish]])
    with pytest.raises(ValueError, match="teacher_logp at group 0, candidate 1 is"):
        adpo.Objective(teacher()).loss(torch.zeros(1, 2), teacher_logp=given)
    with pytest.raises(ValueError, match="rewards at group 0, candidate 1 is -inf"):
        adpo.Objective(adpo.boltzmann(1.0)).loss(torch.zeros(1, 2), rewards=torch.tensor([[0.0, -torch.inf]]))


def test_a_teacher_without_any_mass_is_refused():
    given = torch.tensor([[0.0, 0.0], [-torch.inf, 3.0], [-torch.inf, 5.0]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    with pytest.raises(
        ValueError, match="teacher_logp at group 2 is -inf; expected a finite value for some candidate"
    ):
        adpo.Objective(teacher()).loss(torch.zeros(3, 2), mask=mask, teacher_logp=given)
    objective = adpo.Objective(teacher())
    of_groups = torch.func.vmap(
        lambda given: objective.coefficients(torch.zeros(1, 2), teacher_logp=given[None])[0]
    )
    found = of_groups(torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]]))
    assert found.isnan().all(1).tolist() == [False, True]


def test_flat_rows_carry_it_through_any_split():
    logp = torch.tensor([0.3, -0.2, 0.1, 0.5], requires_grad=True)
    given, ids = torch.tensor([0.0, -1.0, -torch.inf, -0.5]), torch.tensor([0, 1, 0, 1])
    objective = adpo.Objective(teacher())
    result = adpo.exact.backward(
        objective, lambda rows: logp[rows], torch.arange(4).split(1), ids, teacher_logp=given
    )
    table, _, index = adpo.from_flat(logp.detach(), ids)
    c = objective.coefficients(table, teacher_logp=adpo.from_flat(given, ids)[0])
    torch.testing.assert_close(result.coefficients.float(), adpo.to_flat(c, index))
    torch.testing.assert_close(logp.grad, adpo.to_flat(c, index))
