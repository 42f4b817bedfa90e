"""Log-probabilities without the table of logits equal those with it: values and all gradients."""

import pytest
import torch

from adpo.lm.head import fused_token_logp, token_logp


def case(tokens, width, vocabulary, dtype, bias, seed=0):
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).to(dtype).requires_grad_()
    offset = torch.randn(vocabulary, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, torch.randint(vocabulary, (tokens,)), offset


def values_and_gradients(function, inputs, above):
    hidden, weight, targets, bias = inputs
    found = function(hidden, weight, targets, bias)
    wanted = [value for value in (hidden, weight, bias) if value is not None and value.requires_grad]
    return found, torch.autograd.grad(found, wanted, above.to(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 3, 8, 100, None])
@pytest.mark.parametrize("shape", [(1, 4, 5), (8, 16, 33), (17, 8, 1000)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(shape, chunk, dtype, bias):
    inputs = case(*shape, dtype, bias)
    above = torch.randn(shape[0])
    plain, of_plain = values_and_gradients(token_logp, inputs, above)
    fused, of_fused = values_and_gradients(lambda *given: fused_token_logp(*given, chunk=chunk), inputs, above)
    close = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(fused, plain, **close)
    for mine, other in zip(of_fused, of_plain, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, **close)


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
    assert weight.grad is None
    assert hidden.grad is not None
