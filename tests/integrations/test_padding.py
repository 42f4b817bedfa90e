"""What pads a batch does not reach its log-probabilities, whatever the model makes of padding."""

import pytest
import small_models
import test_trl_online as online
import tiny_lm
import torch
from datasets import Dataset

from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

ARGUMENTS = {"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4, "scoring": "padded"}
VOCABULARY = 2 + len(tiny_lm.CHARACTERS)


def trainer(folder, name, kind=ADPOTrainer, config=ADPOConfig, **options):
    return kind(
        model=small_models.made(name, vocab_size=VOCABULARY),
        reward_funcs=online.reward,
        args=config(str(folder), **{**ARGUMENTS, "per_device_train_batch_size": 4, **options}),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        processing_class=tiny_lm.tokenizer(),
    )


def rows():
    """Prompts padded on the left, completions on the right."""
    prompts, completions = [[5, 6, 7, 8, 9], [10], [11, 12]], [[13, 14], [4, 5, 6, 1], [7]]
    width, length = 5, 4
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([c + [0] * (length - len(c)) for c in completions]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (length - len(c)) for c in completions]),
    }, list(zip(prompts, completions, strict=True))


def alone(model, prompt, completion):
    ids = torch.tensor([prompt + completion])
    logp = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(1)
    return logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].double().sum()


@pytest.mark.parametrize("name", ["gpt2", "llama", "lfm2", "jamba", "falcon_h1", "qwen3_next"])
@pytest.mark.parametrize("kind", [(ADPOTrainer, ADPOConfig), (FastGRPOTrainer, FastGRPOConfig)])
def test_a_padded_batch_is_its_rows_one_by_one(tmp_path, name, kind):
    ours = trainer(tmp_path, name, *kind)
    batch, pairs = rows()
    per_token, _ = ours.row_scorer.per_token(ours.model, batch)
    found = (per_token.double() * batch["completion_mask"]).sum(1)
    expected = torch.stack([alone(ours.model, *pair) for pair in pairs])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    parameters = [p for p in ours.model.parameters() if p.requires_grad]
    options = {"allow_unused": True, "materialize_grads": True}
    mine = torch.autograd.grad((found * weight).sum(), parameters, **options)
    theirs = torch.autograd.grad((expected * weight).sum(), parameters, **options)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_entropies_are_put_back_in_their_columns(tmp_path):
    ours = trainer(tmp_path, "gpt2")
    batch, pairs = rows()
    _, entropies = ours.row_scorer.per_token(ours.model, batch, entropy=True)
    for found, (prompt, completion) in zip(entropies, pairs, strict=True):
        logp = ours.model(input_ids=torch.tensor([prompt + completion])).logits[0].float().log_softmax(1)
        expected = -(logp.exp() * logp).sum(1)[len(prompt) - 1 : -1]
        torch.testing.assert_close(found[: len(completion)], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", [(ADPOTrainer, ADPOConfig), (FastGRPOTrainer, FastGRPOConfig)])
def test_a_model_that_reads_padding_is_refused_before_anything_is_sampled(tmp_path, kind):
    with pytest.raises(ValueError, match="reads the padding on the left of prompts") as complaint:
        trainer(tmp_path, "rwkv", *kind)
    assert "\n" not in str(complaint.value)
