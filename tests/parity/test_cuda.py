"""The same numbers on a CUDA device (``pytest -m gpu``)."""

import pytest
import torch

import adpo
from adpo.exact import backward
from draws import OBJECTIVES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def batch():
    generator = torch.Generator().manual_seed(0)
    logp, anchor, teacher = torch.randn(3, 16, 9, generator=generator, dtype=torch.float64)
    signals = {
        "rewards": torch.randint(0, 4, (16, 9), generator=generator).double(),
        "teacher_logp": teacher,
        "q": torch.softmax(teacher, 1),
        "labels": torch.randint(0, 9, (16,), generator=generator),
        "mask": torch.rand(16, 9, generator=generator) < 0.8,
    }
    signals["mask"][torch.arange(16), signals["labels"]] = True
    signals["q"] = torch.where(signals["mask"], signals["q"], 0.0)
    signals["q"] /= signals["q"].sum(1, keepdim=True)
    return logp, anchor, signals


@pytest.mark.parametrize("name", OBJECTIVES)
def test_coefficients_and_diagnostics_equal_the_cpu(name):
    objective = adpo.Objective(*OBJECTIVES[name], tau=0.7)
    logp, anchor, signals = batch()
    on_device = {key: value.cuda() for key, value in signals.items()}
    c = objective.coefficients(logp.cuda(), anchor.cuda(), **on_device)
    assert c.device.type == "cuda"
    torch.testing.assert_close(c.cpu(), objective.coefficients(logp, anchor, **signals))
    there = objective.diagnostics(logp.cuda(), anchor.cuda(), **on_device)
    here = objective.diagnostics(logp, anchor, **signals)
    torch.testing.assert_close([value.cpu() for value in there], list(here))


@pytest.mark.parametrize("name", ["boltzmann/cross_entropy", "efron/cross_entropy", "kde/reverse_kl"])
def test_objectives_compile_on_the_device(name):
    objective = adpo.Objective(*OBJECTIVES[name])
    compiled = torch.compile(lambda logp, rewards: objective.loss(logp, None, rewards=rewards), fullgraph=True)
    logp, _, signals = batch()
    leaf, rewards = logp.cuda().requires_grad_(), signals["rewards"].cuda()
    loss = compiled(leaf, rewards)
    loss.backward()
    torch.testing.assert_close(leaf.grad, objective.coefficients(leaf, None, rewards=rewards))


def test_exact_backward_does_not_depend_on_the_pieces():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).cuda()
    features, ids = torch.randn(40, 8, device="cuda"), torch.arange(40, device="cuda") % 7
    rewards = torch.randint(0, 2, (40,), device="cuda").float()
    objective = adpo.Objective(adpo.plackett_luce())
    gradients = []
    for size in (40, 3):
        model.zero_grad()
        pieces = list(torch.randperm(40, device="cuda").split(size))
        backward(objective, lambda rows: model(features[rows]).squeeze(1), pieces, ids, None, rewards=rewards)
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(*gradients)
