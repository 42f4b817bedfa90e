"""Packed sequences equal padded ones: values and gradients, prompts shared or not, ragged shapes."""

import random

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from adpo.scoring.packed.packed_scoring import packed_seq_logp
from adpo.scoring.packed.packing import packed, repacked
from adpo.scoring.packed.packing_checks import why_not_packed
from adpo.scoring.scorer import Forms, Scorer
from adpo.scoring.sequences import seq_logp, sequences, token_logp

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def model(kind, width=8):
    torch.manual_seed(0)
    return {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=width, tie_word_embeddings=True)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=width, attention_bias=True)),
    }[kind]()


def lists(seed, groups=3, most=4):
    """Prompts, each with several completions, one after the other."""
    draw = random.Random(seed)

    def tokens(length):
        return [draw.randrange(2, 40) for _ in range(draw.randint(1, length))]

    prompts, completions = [], []
    for _ in range(groups):
        prompt = tokens(7)
        for _ in range(draw.randint(1, most)):
            prompts.append(prompt)
            completions.append(tokens(9))
    return prompts, completions


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_are_those_of_padded_rows(kind, share, reduction, seed):
    prompts, completions = lists(seed)
    weights = torch.randn(len(prompts), dtype=torch.float64)
    plain, other = model(kind), model(kind)
    expected = seq_logp(plain, sequences(prompts, completions, pad=0), reduction)
    (expected * weights).sum().backward()
    found = packed_seq_logp(other, packed(prompts, completions, share), reduction)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=2e-5)


def test_a_shared_prompt_goes_through_the_model_once():
    prompts, completions = [[2, 3, 4]] * 3 + [[2, 3]], [[5], [6, 7], [8], [9]]
    assert packed(prompts, completions).input_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 2, 3, 9]
    assert len(packed(prompts, completions, share=False).input_ids) == 3 * 3 + 2 + 5
    assert packed(prompts, completions, share=False).plan.keys is None
    assert packed(prompts, completions).plan.longest_key == 5


def test_padded_rows_go_the_way_they_went():
    """What is not packed does not notice."""
    import adpo.scoring.packed.attention as ours

    made, rows = model("qwen3"), sequences(*lists(1), pad=0)
    found = made(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is ours.attention
    try:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", ours._plain)
        assert torch.equal(made(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits, found)
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", ours.attention)


def test_a_model_of_another_make_is_not_packed():
    eager = model("qwen3")
    eager.set_attn_implementation("eager")
    assert why_not_packed(model("qwen3")) is None
    assert why_not_packed(eager) is not None


def test_what_packing_would_change_is_not_packed():
    from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

    window = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))
    assert why_not_packed(window) == "it attends through a window (sliding_window = 16)"
    assert why_not_packed(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=64))) is None
    forgets = LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1))
    assert why_not_packed(forgets) == "its attention has dropout"
    assert (
        why_not_packed(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2))) == "its attention has dropout"
    )
    wide = model("llama").bfloat16()
    wide.lm_head.float()
    assert "another precision" in why_not_packed(wide)
    capped = model("qwen3")
    capped.config.final_logit_softcapping = 30.0
    assert "changes its logits" in why_not_packed(capped)


def test_under_autocast_attention_is_in_its_precision(monkeypatch):
    """Rotary embeddings leave queries and keys in float32."""
    from adpo.scoring.packed.attention_kernels import KERNELS

    seen = []
    plain = KERNELS["stretches"]

    def watched(q, k, v, *rest):
        seen.append({part.dtype for part in (q, k, v)})
        return plain(q, k, v, *rest)

    monkeypatch.setitem(KERNELS, "stretches", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        packed_seq_logp(model("qwen3"), packed(*lists(0)))
    assert seen == [{torch.bfloat16}] * 2


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_without_a_prompt_the_first_token_is_not_scored(share, reduction):
    """A list whose only prompt token merges with its completions; packed as ids, and from padded rows."""
    prompts = [[], [], [], [7], [], []]
    completions = [[7, 3, 4], [7, 5], [8, 5, 2], [4, 4], [9], [9, 3]]
    rows = sequences(prompts, completions, pad=0)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5, -1.0], dtype=torch.float64)
    plain = model("qwen3")
    expected = seq_logp(plain, rows, reduction)
    (expected * weights).sum().backward()
    assert expected[4] == 0
    for batch in (packed(prompts, completions, share), repacked(rows, share)):
        other = model("qwen3")
        found = packed_seq_logp(other, batch, reduction)
        (found * weights).sum().backward()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=2e-5)


def test_tokens_without_a_prompt():
    made, rows = model("qwen3"), sequences([[], [2]], [[7, 3, 4], [5]], pad=0)
    scorer = Scorer(made, Forms(scoring="packed"))
    torch.testing.assert_close(scorer.tokens(made, rows).logp.sum(1), seq_logp(made, rows).float())
    some = torch.tensor([[1, 0, 1], [0, 1, 0]])
    expected = torch.where(some[:, 1:].bool(), token_logp(made, rows), 0.0).sum(1)
    torch.testing.assert_close(scorer.logp(made, rows, scored=some).float(), expected)


def test_a_row_needs_a_token():
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        packed([[2], []], [[3], []])


def test_a_window_is_refused():
    made = Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=2, max_window_layers=0)
    )
    with pytest.raises(ValueError, match="attends through a window"):
        packed_seq_logp(made, packed([[2, 3]], [[4, 5, 6]]))
