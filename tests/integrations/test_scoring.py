"""Log-probabilities of completions: padding, neighbours and the other rows of a batch change nothing."""

import pytest
import tiny_lm
import torch

from adpo.scoring.sequences import Sequences, seq_logp, sequences, token_logp

PROMPTS = [[2, 3], [4, 5, 6, 7], [8]]
COMPLETIONS = [[9, 10, 1], [3, 1], [4, 5, 6, 7, 8, 1]]


def one_by_one(model, prompt, completion):
    """Softmax of the logits, token by token."""
    ids = torch.tensor([prompt + completion])
    logp = model(input_ids=ids).logits[0].double().log_softmax(-1)
    return sum(logp[len(prompt) + i - 1, token] for i, token in enumerate(completion))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_batch_is_its_rows_one_by_one(reduction):
    model = tiny_lm.model()
    found = seq_logp(model, sequences(PROMPTS, COMPLETIONS, pad=0), reduction)
    for value, prompt, completion in zip(found, PROMPTS, COMPLETIONS, strict=True):
        expected = one_by_one(model, prompt, completion) / (len(completion) if reduction == "mean" else 1)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)


def test_what_pads_does_not_matter_and_gradients_are_those_of_the_rows():
    model = tiny_lm.model()
    batch = sequences(PROMPTS, COMPLETIONS, pad=0)
    weights = torch.tensor([0.3, -1.0, 2.0])
    (seq_logp(model, batch) * weights).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    other = sequences(PROMPTS, COMPLETIONS, pad=5)
    for i, weight in enumerate(weights):
        (seq_logp(model, other.pick(torch.tensor([i]))) * weight).sum().backward()
    for mine, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=0, atol=1e-5)


def test_picked_rows_lose_their_padding():
    batch = sequences(PROMPTS, COMPLETIONS, pad=0)
    assert batch.input_ids.shape == (3, 7)
    few = batch.pick(torch.tensor([0]))
    assert few.input_ids.tolist() == [[2, 3, 9, 10, 1]]
    assert few.completion_mask.tolist() == [[0, 0, 1, 1, 1]]
    assert isinstance(few, Sequences)


def test_tokens_have_log_probabilities():
    model = tiny_lm.model()
    logp = token_logp(model, sequences(PROMPTS, COMPLETIONS, pad=0))
    assert logp.shape == (3, 6)
    assert (logp < 0).all()
