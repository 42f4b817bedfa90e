"""Compiled layers give what plain ones give, for any number of tokens, from one compilation."""

import pytest
import torch

pytest.importorskip("transformers")

import test_packed
from torch._dynamo.utils import counters

from adpo.scoring.compiled import CompiledLayers, decoder_layers, why_not_compiled
from adpo.scoring.packed.packed_scoring import packed_seq_logp
from adpo.scoring.packed.packing import packed


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_values_gradients_and_number_of_compilations(checkpointing):
    plain, made = test_packed.model("qwen3"), test_packed.model("qwen3")
    torch._dynamo.reset()
    CompiledLayers(made, backend="aot_eager")
    if checkpointing:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made.train()
    compilations = []
    for seed in range(3):
        batch = packed(*test_packed.lists(seed, groups=seed + 1))
        found, expected = packed_seq_logp(made, batch), packed_seq_logp(plain, batch)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for model, total in ((made, found), (plain, expected)):
            model.zero_grad()
            total.sum().backward()
        for mine, other in zip(made.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=2e-5)
        compilations.append(counters["stats"]["unique_graphs"])
    assert compilations[0] > 0
    assert compilations[1:] == compilations[:1] * 2  # other sizes, nothing new
    before = counters["stats"]["unique_graphs"]
    made.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
    assert counters["stats"]["unique_graphs"] == before  # what is not packed is not compiled


def test_a_cpu_compiles_nothing_by_itself():
    model = test_packed.model("qwen3")
    assert why_not_compiled(model) == "layers are compiled on a GPU"
    assert len(decoder_layers(model)) == 2


def test_layers_that_the_compiler_does_not_take_are_used_as_they_are(caplog):
    def broken(*_):
        raise AssertionError("no such graph")

    plain, made = test_packed.model("qwen3"), test_packed.model("qwen3")
    torch._dynamo.reset()
    layers = CompiledLayers(made, backend=broken)
    batch = packed(*test_packed.lists(0))
    torch.testing.assert_close(packed_seq_logp(made, batch), packed_seq_logp(plain, batch), rtol=0, atol=0)
    assert "gave up" in layers.why_not
    assert sum("not compiled" in line for line in caplog.messages) == 1
