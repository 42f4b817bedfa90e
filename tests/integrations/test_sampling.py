"""How a trainer's own model samples: compiled on a GPU, as TRL does elsewhere, and never worse than that."""

import pytest
import test_trl_online as online
import tiny_lm
import torch
from datasets import Dataset

from adpo.sampling.decoding import PADDED_TO
from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer
from adpo.trainers.trl.rollout.sampling import PolicySampler

KINDS = {"adpo": (ADPOTrainer, ADPOConfig), "grpo": (FastGRPOTrainer, FastGRPOConfig)}


def trainer(folder, kind="adpo", **options):
    cls, config = KINDS[kind]
    given = {"per_device_train_batch_size": 8, "max_steps": 1, "num_generations": 4, "max_completion_length": 6}
    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    if kind == "adpo":
        given["truncated"] = "keep"  # there is something to learn even where chance lets no completion end
    model = tiny_lm.model()
    model.config.max_position_embeddings = 512  # prompts are padded
    return cls(
        model=model,
        reward_funcs=online.reward,
        args=config(str(folder), **{"bf16": False, **quiet, **given, **options}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS]),
        processing_class=tiny_lm.tokenizer(),
    )


def sample(of, prompts):
    torch.manual_seed(0)
    return of._generate_single_turn(prompts, None, {}, 4)[0]


@pytest.fixture
def anywhere(monkeypatch):
    """The cache of fixed size without a GPU, where transformers compiles nothing."""
    monkeypatch.setattr(PolicySampler, "_why_not_compiled", lambda _: None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_from_a_growing_cache(tmp_path, monkeypatch, kind):
    prompts = [[2, 3, 4], [5], [6, 7, 8, 9], [2, 2]]
    plain = trainer(tmp_path / "a", kind)
    assert plain.policy_sampler.why_not_compiled == "no GPU"
    expected = sample(plain, prompts)
    monkeypatch.setattr(PolicySampler, "_why_not_compiled", lambda _: None)
    fixed = trainer(tmp_path / "b", kind)
    assert fixed.pad_to_multiple_of == PADDED_TO
    caches = watch(fixed, monkeypatch)
    assert sample(fixed, prompts) == expected
    fixed.model.eval()
    sample(fixed, prompts)
    assert caches == [("static", False), (None, True)]  # evaluation is as before


def watch(of, monkeypatch):
    """Cache, and whether compiling is off, of every call of the model's sampling."""
    seen = []
    plain = of.model.generate

    def generate(*arguments, generation_config, **options):
        seen.append((generation_config.cache_implementation, generation_config.disable_compile))
        return plain(*arguments, generation_config=generation_config, **options)

    monkeypatch.setattr(of.model, "generate", generate)
    return seen


@pytest.mark.usefixtures("anywhere")
def test_a_training_step_on_what_it_sampled(tmp_path):
    made = trainer(tmp_path)
    made.train()
    assert made.state.global_step == 1
    assert made.policy_sampler.why_not_compiled is None


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_float32_are_sampled_from_a_copy_in_the_precision_of_passes(tmp_path, monkeypatch, kind):
    made = trainer(tmp_path, kind, max_steps=2, learning_rate=0.1, bf16=True)
    policy = made.accelerator.unwrap_model(made.model)
    seen = []
    plain = type(policy).generate

    def generate(model, *arguments, **options):
        pairs = zip(model.parameters(), policy.parameters(), strict=True)
        seen.append((model is policy, all(torch.equal(mine, theirs.bfloat16()) for mine, theirs in pairs)))
        return plain(model, *arguments, **options)

    monkeypatch.setattr(type(policy), "generate", generate)
    start = [value.clone() for value in policy.parameters()]
    made.train()
    assert seen == [(False, True), (False, True)]  # made anew before the second rollout
    assert any(not torch.equal(now, before) for now, before in zip(policy.parameters(), start, strict=True))
    assert all(value.dtype == torch.float32 for value in policy.parameters())
    assert "from a copy of the policy in torch.bfloat16" in made.policy_sampler.description()
    assert made.model_wrapped is not made.policy_sampler._copy
    for (name, mine), theirs in zip(made.policy_sampler._copy.named_buffers(), policy.buffers(), strict=True):
        assert torch.equal(mine, theirs), name  # frequencies of positions are not rounded


@pytest.mark.usefixtures("anywhere")
def test_making_the_copy_draws_no_numbers(tmp_path):
    """A run that is resumed makes it anew, and must sample what it would have sampled."""
    made = trainer(tmp_path, bf16=True)
    before = torch.get_rng_state()
    copy = made.policy_sampler._sampled_from()
    assert torch.equal(torch.get_rng_state(), before)
    tied = copy.config.tie_word_embeddings
    assert (copy.get_output_embeddings().weight is copy.get_input_embeddings().weight) == tied
    assert made.policy_sampler._sampled_from() is copy


@pytest.mark.usefixtures("anywhere")
def test_what_fails_leaves_checkpointing_as_it_was(tmp_path, monkeypatch):
    made = trainer(tmp_path, gradient_checkpointing=True)
    policy = made.accelerator.unwrap_model(made.model)
    plain = policy.generate

    def generate(*arguments, generation_config, **options):
        if generation_config.cache_implementation == "static":
            raise RuntimeError("no such graph")
        return plain(*arguments, generation_config=generation_config, **options)

    monkeypatch.setattr(policy, "generate", generate)
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sample(made, [[2], [3, 4]])
    assert policy.is_gradient_checkpointing


@pytest.mark.usefixtures("anywhere")
def test_what_fails_once_is_not_tried_again(tmp_path, monkeypatch, caplog):
    made = trainer(tmp_path)
    caches = watch(made, monkeypatch)
    plain = made.model.generate

    def generate(*arguments, generation_config, **options):
        found = plain(*arguments, generation_config=generation_config, **options)
        if generation_config.cache_implementation == "static":
            raise RuntimeError("no such\ngraph")
        return found

    monkeypatch.setattr(made.model, "generate", generate)
    assert len(sample(made, [[2], [3, 4]])) == 2
    assert len(sample(made, [[2], [3, 4]])) == 2
    assert [cache for cache, _ in caches] == ["static", None, None]
    assert made.policy_sampler.description() == "by the means of TRL (RuntimeError: no such graph)"
    assert sum("going on without" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_steps_that_are_recorded_train_as_well(tmp_path, monkeypatch, kind, bf16):
    """Without a GPU they are taken one by one, the rest is the same."""
    monkeypatch.setattr(PolicySampler, "_why_no_fixed_cache", lambda _: None)
    made = trainer(tmp_path, kind, record_sampling=True, max_steps=2, learning_rate=0.1, bf16=bf16)
    assert made.policy_sampler.description().startswith("steps recorded as a graph")
    assert ("copy of the policy" in made.policy_sampler.description()) == bf16
    policy = made.accelerator.unwrap_model(made.model)
    monkeypatch.setattr(type(policy), "generate", lambda *_, **__: 1 / 0)
    start = [value.clone() for value in policy.parameters()]
    made.train()
    assert made.state.global_step == 2
    assert len(made.policy_sampler._decoders) == 1
    assert any(not torch.equal(now, before) for now, before in zip(policy.parameters(), start, strict=True))
    said = sample(made, [[2, 3, 4], [5], [6, 7, 8, 9], [2, 2]])
    assert all(1 <= len(each) <= 6 for each in said)
    assert not any(token in made.eos_token_ids for each in said for token in each[:-1])
    for length in (65, 129, 193, 257):
        sample(made, [[2] * length, [3]])
    assert len(made.policy_sampler._decoders) == 3  # the graphs of old sizes are let go


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_rollout_is_sampled_in_parts_where_memory_is_short(tmp_path, monkeypatch, kind, recorded):
    if recorded:
        monkeypatch.setattr(PolicySampler, "_why_no_fixed_cache", lambda _: None)
    given = {"record_sampling": recorded, "temperature": 1e-4, "max_steps": 2}  # nothing is left to chance
    whole = trainer(tmp_path / "a", kind, **given)
    parts = trainer(tmp_path / "b", kind, sampling_rows=3, **given)
    prompts = [[2, 3, 4], [5], [6, 7, 8, 9], [2, 2], [7]]
    sizes = []
    plain = PolicySampler._sampled
    monkeypatch.setattr(PolicySampler, "_sampled", lambda *given: sizes.append(len(given[1])) or plain(*given))
    assert sample(parts, prompts) == sample(whole, prompts)
    assert sizes == [3, 2, 5]
    parts.train()
    assert parts.state.global_step == 2
    assert sizes[3:] == [3, 3, 2] * 2  # rollouts of eight


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling_rows": 0}, "must be at least 1; got 0"),
        ({"sampling_rows": 8, "use_transformers_continuous_batching": True}, "for a model that samples by itself"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_cannot_be(tmp_path, kind, options, said):
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, kind, **options)


def test_memory_that_is_short_is_said_in_a_line(tmp_path, monkeypatch):
    made = trainer(tmp_path)

    def generate(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made.model, "generate", generate)
    with pytest.raises(ValueError, match="no memory for 2 completions at a time: set sampling_rows to fewer"):
        sample(made, [[2], [3, 4]])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "not asked for"),
        ({"record_sampling": True}, "no GPU"),
        ({"record_sampling": True, "top_p": 0.9}, "sampling is shaped by more than a temperature"),
        ({"record_sampling": True, "generation_kwargs": {"num_beams": 2}}, "sampling is shaped by more"),
    ],
    ids=str,
)
def test_steps_are_recorded_where_they_can_be(tmp_path, options, reason):
    assert trainer(tmp_path, **options).policy_sampler.why_not_recorded.startswith(reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compile_sampling": False}, "asked for"),
        ({"cache_implementation": "static"}, "a cache was asked for"),
        ({"generation_kwargs": {"cache_implementation": "dynamic"}}, "a cache was asked for"),
        ({"use_transformers_continuous_batching": True}, "continuous batching"),
    ],
    ids=str,
)
def test_what_a_user_asks_for_is_left_alone(tmp_path, options, reason):
    made = trainer(tmp_path, **options)
    assert made.policy_sampler.why_not_compiled == reason
    assert made.pad_to_multiple_of is None
