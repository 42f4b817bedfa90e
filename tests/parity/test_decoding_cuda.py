"""Steps recorded as a graph on a CUDA device say what the same steps say one by one (``pytest -m gpu``)."""

import time

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from adpo.sampling.decoding import Decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PAD, END, WORDS = 0, 1, 4096


def model(dtype=torch.float32, layers=2, words=WORDS):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    made = LlamaForCausalLM(config).cuda().to(dtype).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(20)
    return made


def prompts(rows, width, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=draw)
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    return torch.where(mask.bool(), torch.randint(2, WORDS, (rows, width), generator=draw), PAD), mask


def test_the_recorded_steps_are_the_steps():
    of = model()
    recorded, plain = (Decoder(of, 32, 16, 40, 0.0, [END], PAD) for _ in range(2))
    plain.recorded = False
    for seed in range(3):
        batch = prompts(32, 16, seed)
        assert torch.equal(recorded(*batch), plain(*batch))
    assert recorded.graph is not None
    assert plain.graph is None
    with torch.no_grad():
        of.model.embed_tokens.weight.mul_(-1)  # weights that change in place are seen
    assert torch.equal(recorded(*prompts(32, 16)), plain(*prompts(32, 16)))


def test_recorded_samples_differ_and_follow_the_seed():
    of = model()
    with torch.no_grad():
        of.lm_head.weight.mul_(0.05)
    decoder = Decoder(of, 64, 16, 12, 1.0, [END], PAD)
    batch = prompts(64, 16)
    decoder(*batch)  # recording draws numbers, too
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(decoder(*batch))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    said = found[0][:, 1:]
    assert len(set(said[said != PAD].tolist())) > 100  # a new draw at every replay


def test_few_rows_that_are_left_go_on_among_themselves():
    of = model()
    ids, mask = prompts(256, 16)
    said = Decoder(of, 256, 16, 96, 0.0, [], PAD)(ids, mask)
    ends = said[:240, 12].unique().tolist()  # most rows have said one of these by their thirteenth token
    recorded, plain = (Decoder(of, 256, 16, 96, 0.0, ends, PAD) for _ in range(2))
    plain.recorded = False
    for _ in range(2):
        assert torch.equal(recorded(ids, mask), plain(ids, mask))
    assert recorded.fewer.graph is not None
    assert plain.fewer.graph is None


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_recorded_samples_have_the_distribution_of_the_model(temperature):
    of = model(words=32)
    with torch.no_grad():
        of.lm_head.weight.mul_(0.05)
    row = prompts(1, 8)[0].remainder(30).add(2).cuda()
    count = 8192
    found = Decoder(of, count, 8, 3, temperature, [END], PAD)(row.expand(count, 8), torch.ones(count, 8))
    first = int(found[:, 0].mode().values)
    mine = found[found[:, 0] == first, 1]  # the first token that a graph has drawn
    with torch.no_grad():
        right = (of(torch.cat([row, row.new_tensor([[first]])], 1)).logits[0, -1] / temperature).softmax(0)
    share = torch.bincount(mine, minlength=32) / len(mine)
    assert (share - right).abs().max() < 5 * (right * (1 - right) / len(mine)).sqrt().max() + 1e-3


def test_a_token_takes_less_time_recorded():
    """Of a model whose kernels are small; by far, so that no noise turns it round."""
    of = model(torch.bfloat16, layers=16)
    seconds = {}
    for name in ("recorded", "plain"):
        decoder = Decoder(of, 32, 16, 64, 1.0, [], PAD)
        decoder.recorded = name == "recorded"
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            decoder(*prompts(32, 16))
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - began
    print({name: f"{1000 * each / 64:.2f} ms a token" for name, each in seconds.items()})  # noqa: T201
    assert seconds["recorded"] < seconds["plain"]
