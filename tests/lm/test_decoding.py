"""Sampling by steps over a cache of fixed size says what `generate` of transformers says."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from adpo.sampling.decoding import Decoder, FixedCache
from adpo.sampling.decoding_checks import why_not_decoded

PAD, END = 0, 1
SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
KINDS = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}


def model(kind="llama", attention="sdpa", seed=0):
    torch.manual_seed(seed)
    cls, config = KINDS[kind]
    made = cls(config(**SIZES, pad_token_id=PAD, eos_token_id=END, attn_implementation=attention))
    with torch.no_grad():  # sharp enough that the most likely tokens are no near ties
        made.lm_head.weight.mul_(20)
    return made.eval()


def prompts(rows, width, seed=0):
    """Padded on the left, of several lengths."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 24, (rows, width), generator=draw)
    lengths = torch.randint(1, width + 1, (rows,), generator=draw)
    lengths[0] = width
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    return torch.where(mask.bool(), ids, PAD), mask


def generated(of, ids, mask, tokens, ends=END):
    found = of.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=ends,
    )
    return found[:, ids.shape[1] :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_most_likely_tokens_are_those_of_generate(kind, attention, tokens):
    of = model(kind, attention)
    decoder = Decoder(of, 6, 9, tokens, 0.0, [END], PAD)
    for seed in range(3):  # the second time over what the first left behind
        ids, mask = prompts(6, 9, seed)
        expected = generated(of, ids, mask, tokens)
        found = decoder(ids, mask)
        assert torch.equal(found[:, : expected.shape[1]], expected)
        assert (found[:, expected.shape[1] :] == PAD).all()


def test_rows_end_one_by_one_and_all_of_them_end_early():
    of = model()
    ids, mask = prompts(8, 5)
    said = generated(of, ids, mask, 64)
    ends = sorted({int(row[3]) for row in said})  # every row says one of these by its fourth token
    found = Decoder(of, 8, 5, 64, 0.0, ends, PAD)(ids, mask)
    assert found.shape[1] < 64
    for row, plain in zip(found, said, strict=True):
        end = next(at for at, token in enumerate(plain.tolist()) if token in ends)
        assert torch.equal(row[: end + 1], plain[: end + 1])
        assert (row[end + 1 :] == PAD).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_few_rows_that_are_left_go_on_among_themselves(attention):
    """To the same end: of 256 rows to 64, and to 16."""
    of, ends = model(attention=attention, seed=1), [END, END + 1]
    decoder = Decoder(of, 256, 5, 64, 0.0, ends, PAD)
    for seed in range(2):
        ids, mask = prompts(256, 5, seed)
        said = generated(of, ids, mask, 64, ends)
        found = decoder(ids, mask)
        assert torch.equal(found[:, : said.shape[1]], said)
        assert (found[:, said.shape[1] :] == PAD).all()
    assert decoder.fewer.rows == 64
    assert decoder.fewer.fewer.rows == 16
    assert decoder.fewer.fewer.fewer is None  # too few to be worth a decoder of their own


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_have_the_distribution_of_the_model(temperature):
    of = model()
    with torch.no_grad():
        of.lm_head.weight.mul_(0.05)
    row, _ = prompts(1, 5)
    ids = row.expand(4000, 5)
    torch.manual_seed(0)
    found = Decoder(of, 4000, 5, 2, temperature, [END], PAD)(ids, torch.ones_like(ids))
    with torch.no_grad():
        right = (of(row).logits[0, -1] / temperature).softmax(0)
    share = torch.bincount(found[:, 0], minlength=24) / 4000
    assert (share - right).abs().max() < 4 * (right * (1 - right) / 4000).sqrt().max()
    first = int(share.argmax())  # and the second token, given the first
    mine = found[found[:, 0] == first, 1]
    with torch.no_grad():
        after = (of(torch.cat([row, torch.tensor([[first]])], 1)).logits[0, -1] / temperature).softmax(0)
    share = torch.bincount(mine, minlength=24) / len(mine)
    assert (share - after).abs().max() < 4 * (after * (1 - after) / len(mine)).sqrt().max()


def test_the_same_seed_says_the_same_and_weights_may_change():
    of = model()
    with torch.no_grad():
        of.lm_head.weight.mul_(0.05)
    ids, mask = prompts(6, 9)
    decoder = Decoder(of, 6, 9, 20, 1.0, [END], PAD)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(decoder(ids, mask))
    assert torch.equal(*found)
    other = model(seed=1)
    of.load_state_dict(other.state_dict())
    greedy = Decoder(of, 6, 9, 20, 0.0, [END], PAD)(ids, mask)
    expected = generated(other, ids, mask, 20)
    assert torch.equal(greedy[:, : expected.shape[1]], expected)


def test_a_model_that_trains_goes_on_training():
    of = model().train()
    Decoder(of, 2, 3, 2, 0.0, [END], PAD)(*prompts(2, 3))
    assert of.training


def test_models_of_other_kinds_are_refused():
    assert why_not_decoded(model()) is None
    of = model()
    of.config.sliding_window = 16
    assert "through a window" in why_not_decoded(of)
    of = model()
    of.config._attn_implementation = "flex_attention"
    assert why_not_decoded(of) == "attention by flex_attention"
    of = model()
    of.config.layer_types = ["full_attention", "linear_attention"]
    assert "do not attend" in why_not_decoded(of)
    assert Qwen2Config().sliding_window is None  # off by default: such models are taken
    with pytest.raises(ValueError, match=r"a decoder for 2 prompts of 3 tokens; got \(2, 4\)"):
        Decoder(model(), 2, 3, 2, 0.0, [END], PAD)(*prompts(2, 4))


def test_what_a_pass_adds_goes_to_its_slots():
    cache = FixedCache(4, torch.device("cpu"))
    cache.slots = torch.tensor([2])
    keys, values = cache.update(torch.ones(1, 1, 1, 2), 2 * torch.ones(1, 1, 1, 2), 0)
    assert keys[0, 0, :, 0].tolist() == [0, 0, 1, 0]
    assert values[0, 0, :, 0].tolist() == [0, 0, 2, 0]
