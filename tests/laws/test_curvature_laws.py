"""Second derivatives of every objective, in every way torch takes them, against differences of coefficients."""

import pytest
import torch

import adpo
from draws import OBJECTIVES

SMOOTH = {name: pair for name, pair in OBJECTIVES.items() if "wasserstein" not in name}
GROUPS = {
    "one winner": ([1, 0, 0], None),
    "two winners": ([1, 1, 0, 0], None),
    "all tied": ([1, 1, 1], None),
    "strict": ([2, 0, 1], None),
    "masked": ([1, 0, 2, 0, 1], [True, True, True, True, False]),
    "all masked": ([1, 0], [False, False]),
}
WAYS = {
    "backward through backward": torch.autograd.functional.hessian,
    "forward over reverse": lambda f, x: torch.func.hessian(f)(x),
    "reverse over reverse": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
    "forward over forward": lambda f, x: torch.func.jacfwd(torch.func.jacfwd(f))(x),
}


def arguments(rewards, mask):
    k = len(rewards)
    generator = torch.Generator().manual_seed(k)
    teacher, logp = torch.randn(2, 1, k, generator=generator, dtype=torch.float64)
    real = torch.ones(1, k, dtype=torch.bool) if mask is None else torch.tensor([mask])
    q = torch.where(real, torch.softmax(teacher, 1), 0.0)
    table = {"rewards": torch.tensor([rewards], dtype=torch.float64), "teacher_logp": teacher, "mask": real}
    return logp[0], {**table, "labels": torch.tensor([0]), "q": q / q.sum().clamp(min=1e-9), "tau": 0.7}


def differences(objective, logp, given, step=1e-5):
    columns = []
    for nudge in step * torch.eye(len(logp), dtype=torch.float64):
        ahead, behind = (objective.coefficients((logp + s * nudge)[None], None, **given)[0] for s in (1, -1))
        columns.append((ahead - behind) / (2 * step))
    return torch.stack(columns, 1)


RANKED = ("efron", "breslow")  # whose closed form ties and masked candidates could break


@pytest.mark.parametrize(
    ("name", "group"),
    [(name, group) for name in SMOOTH for group in GROUPS if name.startswith(RANKED) or group == "masked"],
)
def test_second_derivatives_equal_differences_of_coefficients(name, group):
    objective = adpo.Objective(*SMOOTH[name])
    logp, given = arguments(*GROUPS[group])
    expected = differences(objective, logp, given)
    for way, hessian in WAYS.items():
        found = hessian(lambda x: objective.loss(x[None], None, **given), logp)
        torch.testing.assert_close(
            found, expected, rtol=1e-6, atol=1e-7, msg=lambda text, way=way: f"{way}: {text}"
        )


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("spread", [30.0, 2000.0])
def test_curvature_of_a_ranking_is_finite_for_huge_logits(ties, spread):
    """exp of a difference overflows beyond 709; each stage's curvature is still that of its softmax."""
    rewards = torch.tensor([[2, 1, 1, 0, 2, 0]], dtype=torch.float64)
    u = spread * torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    objective = adpo.Objective(adpo.plackett_luce(ties))
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for level in (2, 1):
        stratum, at_risk = (rewards[0] == level), (rewards[0] <= level)
        for turn in range(2):
            weight = torch.where(stratum & torch.tensor(ties == "efron"), 1 - turn / 2, 1.0) * at_risk
            p = torch.softmax(u + weight.log(), 0)
            expected += torch.diag(p) - torch.outer(p, p)
    for hessian in WAYS.values():
        found = hessian(lambda x: objective.loss(x[None], None, rewards=rewards), u)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("way", ["forward over reverse", "reverse over reverse"])
def test_the_curvature_of_a_ranking_in_compiled_code(ties, way):
    rewards, u = torch.tensor([[1.0, 1, 0, 0]]), torch.zeros(4, dtype=torch.float64)
    objective = adpo.Objective(adpo.plackett_luce(ties))

    def loss(x):
        return objective.loss(x[None], None, rewards=rewards)

    compiled = torch.compile(lambda x: WAYS[way](loss, x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(u), WAYS[way](loss, u))


def test_two_backward_passes_through_a_compiled_ranking():
    rewards = torch.tensor([[1.0, 1, 0, 0]])
    objective = adpo.Objective(adpo.plackett_luce())

    def loss(x):
        return objective.loss(x[None], None, rewards=rewards)

    u = torch.zeros(4, dtype=torch.float64)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(torch.autograd.functional.hessian(compiled, u), torch.func.hessian(loss)(u))


def test_third_derivatives_of_a_ranking_equal_differences_of_second_ones():
    rewards, u = torch.tensor([[1.0, 1, 0, 0]]), torch.tensor([0.3, -1.0, 0.5, 0.1], dtype=torch.float64)
    objective = adpo.Objective(adpo.plackett_luce())

    def curvature(x):
        return torch.func.hessian(lambda y: objective.loss(y[None], None, rewards=rewards))(x)

    found = torch.func.jacrev(curvature)(u)
    for i, nudge in enumerate(1e-5 * torch.eye(4, dtype=torch.float64)):
        torch.testing.assert_close(found[..., i], (curvature(u + nudge) - curvature(u - nudge)) / 2e-5)


def test_products_with_the_curvature_of_many_groups_at_once():
    rewards = torch.randint(3, (5, 7), generator=torch.Generator().manual_seed(0)).double()
    logp = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    loss = adpo.presets.anchored_ranking().loss(logp, None, rewards=rewards)
    (c,) = torch.autograd.grad(loss, logp, create_graph=True)
    (product,) = torch.autograd.grad(c, logp, torch.ones_like(c))
    assert product.abs().max() < 1e-12  # a shift of a group changes nothing
