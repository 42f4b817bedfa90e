"""The trainers on a CUDA device: packed rows against padded ones, and against TRL's own (``pytest -m gpu``)."""

import pytest
import torch

pytest.importorskip("trl")

import test_listwise_trainer as listwise
import test_packed_online as packed_online
import test_trl_online as online
import tiny_lm

from adpo.scoring.budget import TokenBudget

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PRECISIONS = {
    "float32": ({"bf16": False, "scoring": "packed"}, 1e-3),
    "float32 weights, bfloat16 passes": ({"bf16": True}, 0.1),
}
ON_GPU = {"use_cpu": False}


def moves(trainer):
    """By how much every weight has changed."""
    pairs = zip(online.weights(trainer), tiny_lm.model().parameters(), strict=False)
    return torch.cat([(now - before.to(now)).flatten().float() for now, before in pairs])


def assert_moved_alike(found, expected, relative):
    mine, other = moves(found), moves(expected)
    assert other.norm() > 0
    assert (mine - other).norm() < relative * other.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [40, "auto"])
@pytest.mark.parametrize("iterations", [1, 2])
def test_adpo(tmp_path, precision, tokens, iterations):
    options, relative = PRECISIONS[precision]
    given = {**options, **ON_GPU, "num_iterations": iterations}
    plain = online.trained(tmp_path / "a", 4, 4, **{**given, "scoring": "padded"})
    packs = online.trained(tmp_path / "b", 4, 4, tokens_per_pass=tokens, **given)
    assert packs.scorer.packs
    assert "layers compiled" in packs.scorer.chosen()
    assert not plain.scorer.packs
    assert_moved_alike(packs, plain, relative)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_losses_of_trl(tmp_path, precision, name):
    options, relative = PRECISIONS[precision]
    given = {**packed_online.LOSSES[name], **ON_GPU}
    stock = packed_online.trained(packed_online.Stock, tmp_path / "a", bf16=options["bf16"], **given)
    fast = packed_online.trained(packed_online.Fast, tmp_path / "b", **options, **given)
    assert fast.scorer.packs
    assert_moved_alike(fast, stock, relative)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lists(tmp_path, precision):
    options, relative = PRECISIONS[precision]
    given = {**options, **ON_GPU}
    plain = listwise.trained(tmp_path / "a", listwise.ragged(), **{**given, "scoring": "padded"})
    packs = listwise.trained(tmp_path / "b", listwise.ragged(), **given)
    assert packs.scorer.packs
    assert_moved_alike(packs, plain, relative)


def test_memory_that_runs_out_halves_the_budget(tmp_path, monkeypatch):
    """A real failure of the allocator, in the first pass of more than so many tokens."""
    plain, seen = TokenBudget.begin, []

    def begin(budget, tokens):
        plain(budget, tokens)
        if tokens > 40:
            seen.append(tokens)
            torch.empty(2**50, device="cuda", dtype=torch.uint8)

    given = {"bf16": False, "scoring": "packed", **ON_GPU}
    expected = online.trained(tmp_path / "a", 4, 4, tokens_per_pass=40, **given)
    monkeypatch.setattr(TokenBudget, "begin", begin)
    found = online.trained(tmp_path / "b", 4, 4, tokens_per_pass=80, **given)
    assert len(seen) == 1
    assert found.scorer.budget.tokens <= 40
    assert_moved_alike(found, expected, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_decoding_samples_from_the_policy(tmp_path, dtype):
    """As often as the model says: first tokens of many completions against the probabilities of the prompt."""
    trainer = sampled(tmp_path, dtype)
    assert trainer.policy_sampler.why_not_compiled is None
    assert trainer.generation_config.cache_implementation is None  # evaluation is as before
    prompts = [[2, 3, 4], [5, 6], [7]]
    found = [trainer._generate_single_turn([prompt] * 2048, None, {}, 4)[0] for prompt in prompts]
    for prompt, completions in zip(prompts, found, strict=True):
        first = torch.tensor([row[0] for row in completions]).bincount(minlength=16) / len(completions)
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt], device="cuda")).logits[0, -1]
        assert (first - logits.float().softmax(0).cpu()).abs().max() < 0.05
    assert trainer.policy_sampler.why_not_compiled is None


def sampled(folder, dtype):
    """A trainer whose model samples by itself, after two steps."""
    from datasets import Dataset

    from adpo.trainers.trl import ADPOConfig, ADPOTrainer

    given = {"per_device_train_batch_size": 8, "max_steps": 2, "num_generations": 4, "max_completion_length": 12}
    trainer = ADPOTrainer(
        model=tiny_lm.model().to(dtype),
        reward_funcs=online.reward,
        args=ADPOConfig(str(folder), report_to="none", save_strategy="no", disable_tqdm=True, **given),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS]),
        processing_class=tiny_lm.tokenizer(),
    )
    trainer.train()
    return trainer
