"""Log-probabilities without the table of logits equal those with it: values and all gradients."""

import pytest
import torch

from adpo.scoring.fused_head import fused_token_logp, fused_token_scores, token_scores, weighted_token_logp


def case(tokens, width, vocabulary, dtype, bias, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).to(dtype).requires_grad_()
    offset = torch.randn(vocabulary, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, torch.randint(vocabulary, (tokens,)), offset


def gradients(total, inputs):
    return torch.autograd.grad(total, [value for value in inputs if value is not None and value.requires_grad])


def tolerance(dtype):
    return {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}


def assert_alike(mine, others, dtype):
    for one, other in zip(mine, others, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance(dtype))


every_shape = pytest.mark.parametrize("shape", [(1, 4, 5), (8, 16, 33), (17, 8, 1000)], ids=str)
every_chunk = pytest.mark.parametrize("chunk", [1, 3, 100, None])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@every_dtype
@every_chunk
@every_shape
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("of_entropy", [0.0, 0.3])
def test_values_and_gradients(shape, chunk, dtype, bias, temperature, of_entropy):
    """Of any mixture of log-probabilities and entropies."""
    inputs = case(*shape, dtype, bias)
    above = torch.randn(2, shape[0])
    plain = token_scores(*inputs, temperature)
    fused = fused_token_scores(*inputs, temperature, chunk=chunk)
    assert_alike(fused, plain, dtype)
    totals = [(above[0] * one.logp + of_entropy * above[1] * one.entropy).sum() for one in (fused, plain)]
    assert_alike(*(gradients(total, inputs) for total in totals), dtype)


@every_dtype
@every_chunk
@every_shape
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_known_coefficients(shape, chunk, dtype, bias, temperature):
    """The gradient made in the forward pass is that of the backward pass, whatever scales the loss."""
    hidden, weight, targets, offset = inputs = case(*shape, dtype, bias)
    c = torch.randn(shape[0], dtype=torch.float64)
    plain = token_scores(*inputs, temperature).logp
    total, logp = weighted_token_logp(hidden, weight, targets, c, offset, temperature, chunk=chunk)
    torch.testing.assert_close(logp, plain.detach(), **tolerance(dtype))
    torch.testing.assert_close(total, (c * plain.double()).sum().float().detach(), rtol=0.02, atol=0.05)
    assert_alike(gradients(3 * total, inputs), gradients(3 * (c * plain).sum(), inputs), dtype)


@pytest.mark.parametrize("known", [True, False])
def test_under_autocast_both_passes_are_in_its_precision(known):
    hidden, weight, targets, _ = case(9, 16, 50, torch.float32, False)
    c = torch.randn(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = (c * token_scores(hidden, weight, targets).logp).sum()
        mine = (
            weighted_token_logp(hidden, weight, targets, c, chunk=4)[0]
            if known
            else (c * fused_token_logp(hidden, weight, targets, chunk=4)).sum()
        )
    expected, found = gradients(plain, (hidden, weight)), gradients(mine, (hidden, weight))
    exact = gradients((c * token_scores(hidden, weight, targets).logp).sum(), (hidden, weight))
    for one, other, right in zip(found, expected, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - right).abs().max() <= 2 * (other - right).abs().max()  # rounded no more than the plain form
        assert not torch.equal(one, right)  # and in low precision it was


def test_gradients_are_those_of_finite_differences():
    hidden, weight, targets, bias = (
        value.double().detach() if value.is_floating_point() else value
        for value in case(5, 4, 7, torch.float32, True)
    )
    coefficients = torch.tensor([0.3, -1.0, 0.0, 2.0, 0.5])

    def total(h):
        return float((fused_token_logp(h, weight, targets, bias, chunk=2) * coefficients).sum())

    leaf = hidden.clone().requires_grad_()
    (fused_token_logp(leaf, weight, targets, bias, chunk=2) * coefficients).sum().backward()
    for index in [(0, 0), (3, 2), (4, 3)]:
        step = torch.zeros_like(hidden)
        step[index] = 1e-2
        slope = (total(hidden + step) - total(hidden - step)) / 2e-2
        assert slope == pytest.approx(float(leaf.grad[index]), abs=2e-3)
    assert torch.equal(leaf.grad[2], torch.zeros(4))  # a token without coefficient


def test_what_is_frozen_gets_no_gradient():
    hidden, weight, targets, _ = case(6, 4, 9, torch.float32, False)
    weight.requires_grad_(False)
    fused_token_logp(hidden, weight, targets).sum().backward()
    weighted_token_logp(hidden, weight, targets, torch.ones(6))[0].backward()
    assert weight.grad is None
    assert hidden.grad is not None
