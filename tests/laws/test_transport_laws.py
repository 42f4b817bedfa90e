"""Transport at its kinks: whatever comes back is a subgradient.

As a function of the policy's masses the cost is the largest of finitely many linear functions, so along any
direction d it rises at least as steeply as a subgradient c says: f(u + s d) >= f(u) + s c.d - O(s^2). At u = 0 the
policy's distribution function has its steps at multiples of 1/K; targets that have theirs there too are at a kink.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import adpo

STEP = 1e-6


def masses(kind, groups, k, mask, generator):
    """Target masses with steps where those of the uniform policy are."""
    size = mask.sum(1)
    if kind == "equal":
        q = mask.double()
    elif kind == "multiples":  # of 1/K; some are zero
        q = torch.zeros(groups, k, dtype=torch.float64)
        for row in range(groups):
            real = mask[row].nonzero().flatten()
            chosen = real[torch.randint(int(size[row]), (int(size[row]),), generator=generator)]
            q[row].index_add_(0, chosen, torch.ones(len(chosen), dtype=torch.float64))
    else:  # zeros, and pairs of places that share their masses unevenly
        q = torch.rand(groups, k, generator=generator, dtype=torch.float64)
        q = torch.where(mask & (torch.rand(groups, k, generator=generator) < 0.5), q, 0.0)
        q = q + torch.where(q.sum(1, keepdim=True) > 0, 0.0, mask.double())
    return q / q.sum(1, keepdim=True)


@pytest.mark.parametrize("order", [1, 2, 3.5])
@pytest.mark.parametrize("kind", ["equal", "multiples", "zeros"])
@pytest.mark.parametrize("ragged", [False, True])
@settings(max_examples=20)
@given(seed=st.integers(0, 100_000), k=st.integers(2, 8), moved=st.sampled_from([0.0, 0.0, 1.0]))
def test_what_comes_back_is_a_subgradient(order, kind, ragged, seed, k, moved):
    groups, generator = 12, torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(groups, k, generator=generator, dtype=torch.float64)

    mask = torch.ones(groups, k, dtype=torch.bool)
    if ragged:
        mask = torch.rand(groups, k, generator=generator) < 0.7
        mask[:, 0] |= ~mask.any(1)
    q = masses(kind, groups, k, mask, generator)
    positions = torch.randint(4, (groups, k), generator=generator).double() if seed % 2 else normal()
    objective = adpo.Objective(adpo.targets.soft(), adpo.wasserstein(order))
    arguments = {"mask": mask, "q": q, "positions": positions, "reduction": "none"}
    u = moved * torch.where(torch.rand(groups, k, generator=generator) < 0.5, normal(), 0.0)
    value, c = objective.loss(u, None, **arguments), objective.coefficients(u, None, **arguments)
    for _ in range(5):
        d = normal()
        risen = (objective.loss(u + STEP * d, None, **arguments) - value) / STEP
        slack = 1e-5 * (1 + (positions.amax(1) - positions.amin(1)) ** order)
        assert torch.all(risen >= (c * d).sum(1) - slack)


@pytest.mark.parametrize("order", [1, 2])
def test_at_its_optimum_the_cost_is_zero_and_falls_nowhere(order):
    """Equal masses, told by different roundings: 1/4 + 1/4 against 1/2."""
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.5, 0.0, 0.0, 0.5]], dtype=torch.float64)
    positions = torch.tensor([[3.0, 1.0, 0.0, 2.0]] * 3)
    objective = adpo.Objective(adpo.targets.soft(), adpo.wasserstein(order))
    u = q.clamp(min=1e-300).log()
    arguments = {"q": q, "positions": positions, "reduction": "none"}
    assert objective.loss(u, None, **arguments).abs().max() < 1e-15
    c = objective.coefficients(u, None, **arguments)
    for seed in range(50):
        d = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        risen = objective.loss(u + STEP * d, None, **arguments) / STEP
        assert torch.all(risen >= (c * d).sum(1) - 1e-4)
        assert torch.all(risen >= -1e-9)
