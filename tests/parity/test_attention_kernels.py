"""Every form of packed attention gives what stretch by stretch gives: values and gradients."""

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask

pytest.importorskip("transformers")

import test_packed

from adpo.scoring.compiled import CompiledLayers
from adpo.scoring.packed import attention_kernels
from adpo.scoring.packed.attention_kernels import BLOCK, KERNELS, blocks_of, flash, kernel_for, prepared, why_not
from adpo.scoring.packed.packed_scoring import packed_seq_logp
from adpo.scoring.packed.packing import packed
from adpo.scoring.scorer import Forms, Scorer, available_forms
from adpo.scoring.sequences import seq_logp, sequences

CPU = torch.device("cpu")
LENGTHS = st.lists(
    st.tuples(st.integers(1, 200), st.lists(st.integers(1, 150), min_size=1, max_size=4)), max_size=4
)


def rows_of(groups):
    """Prompts of these lengths, each with completions of those."""
    prompts, completions = [], []
    for number, (prompt, lengths) in enumerate(groups):
        for length in lengths:
            prompts.append([number + 2] * prompt)
            completions.append([1] * length)
    return prompts, completions


def dense(plan):
    """``[queries, keys]``: who attends to whom, written out."""
    queries, keys = plan.query_starts.tolist(), plan.key_starts.tolist()
    table = torch.zeros(queries[-1], keys[-1], dtype=torch.bool)
    for i in range(len(queries) - 1):
        count, total = queries[i + 1] - queries[i], keys[i + 1] - keys[i]
        table[queries[i] : queries[i + 1], keys[i] : keys[i + 1]] = (
            torch.ones(count, total).tril(total - count) > 0
        )
    return table


@settings(max_examples=40, deadline=None)
@given(LENGTHS.filter(len), st.booleans())
def test_blocks_of_flex_attention_are_those_with_a_pair(groups, share):
    plan = packed(*rows_of(groups), share).plan
    table, blocks = dense(plan), blocks_of(plan)
    queries, keys = table.shape
    mask = blocks.mask(queries, keys)
    number = [torch.arange(count) for count in table.shape]
    assert torch.equal(mask.mask_mod(0, 0, number[0][:, None], number[1]), table)
    covered, full = (torch.zeros(-(-queries // BLOCK), -(-keys // BLOCK), dtype=torch.bool) for _ in range(2))
    for block in range(len(covered)):
        covered[block, mask.kv_indices[0, 0, block, : mask.kv_num_blocks[0, 0, block]].long()] = True
        full[block, mask.full_kv_indices[0, 0, block, : mask.full_kv_num_blocks[0, 0, block]].long()] = True
    assert not (covered & full).any()
    for i, j in [(i, j) for i in range(len(covered)) for j in range(covered.shape[1])]:
        part = table[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        assert bool(covered[i, j] or full[i, j]) == bool(part.any())
        assert not full[i, j] or part.all()
    plain = BlockMask.from_kv_blocks(*blocks[:4], BLOCK_SIZE=BLOCK, mask_mod=mask.mask_mod)
    for name in ("q", "full_q"):  # what the backward pass goes by
        mine, theirs = (getattr(each, f"{name}_num_blocks") for each in (mask, plain))
        assert torch.equal(mine, theirs)
        mine, theirs = (getattr(each, f"{name}_indices") for each in (mask, plain))
        assert torch.equal(mine, theirs)


@torch.no_grad()
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_flex_attention_gives_log_probabilities_of_padded_rows(share, seed):
    """Gradients are compared on a GPU: on a CPU it has none."""
    prompts, completions = test_packed.lists(seed)
    model = test_packed.model("qwen3")
    batch = packed(prompts, completions, share)
    found = packed_seq_logp(model, batch._replace(plan=prepared(batch.plan, "flex")))
    expected = seq_logp(model, sequences(prompts, completions, pad=0))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_flex_attention_is_in_the_graph_of_the_layers_once_for_all_sizes():
    sizes = []

    def looked_at(graph, _):
        """Blocks must have a size that is known: the compiler has no kernel for any other."""
        calls = [node for node in graph.graph.nodes if "flex_attention" in str(node.target)]
        sizes.extend(tuple(node.args[4][-3:-1]) for node in calls)
        return graph.forward

    torch._dynamo.reset()
    model = test_packed.model("qwen3")
    layers, seen = CompiledLayers(model, backend=looked_at), []
    for seed in range(6):
        prompts, completions = test_packed.lists(seed, groups=seed + 2)
        batch = packed(prompts, completions)
        found = packed_seq_logp(model, batch._replace(plan=prepared(batch.plan, "flex")))
        expected = seq_logp(model, sequences(prompts, completions, pad=0))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        seen.append(counters["stats"]["unique_graphs"])
    assert layers.why_not is None
    assert set(sizes) == {(BLOCK, BLOCK)}
    assert seen[2] == seen[-1], seen  # one block of keys is another graph than several


def test_the_kernel_asked_for_is_used(monkeypatch):
    used = []
    plain = KERNELS["stretches"]
    monkeypatch.setitem(KERNELS, "stretches", lambda *given: (used.append(given[3].kernel), plain(*given))[1])
    model, rows = test_packed.model("qwen3"), sequences(*test_packed.lists(1), pad=0)
    scorer = Scorer(model, Forms(scoring="packed", attention="stretches"))
    assert "attention stretch by stretch" in scorer.chosen()
    used.clear()
    scorer.logp(model, rows)
    assert used == ["stretches"] * 2  # layers


def test_what_a_machine_has_not_is_refused_in_one_line():
    model = test_packed.model("qwen3")
    with pytest.raises(
        ValueError, match="attention varlen does not work here: it takes bfloat16 or float16 on a GPU"
    ):
        Scorer(model, Forms(scoring="packed", attention="varlen"))
    assert Scorer(model, Forms(scoring="padded", attention="varlen")).why_padded == "asked for"
    assert kernel_for(CPU, torch.float32, 8) == "stretches"
    assert why_not("flex", CPU, torch.float32, 8) == "it has a backward pass only on a GPU with triton"
    assert available_forms()["FlashAttention package"] == (attention_kernels.flash_package() or "not installed")


@pytest.mark.parametrize("gives_more", [True, False])
def test_the_flash_attention_package_is_told_the_plan(monkeypatch, gives_more):
    """A module in its place, with the arguments that versions 2, 3 and 4 share."""
    batch = packed(*test_packed.lists(2))
    plan = prepared(batch.plan, "flash")

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    ):
        assert causal
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        out = KERNELS["stretches"](q, k, v, plan, softmax_scale)
        return (out, None) if gives_more else out

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(attention_kernels, "flash_package", lambda: "flash_attn_interface")
    attention_kernels._flash_function.cache_clear()
    queries, keys = int(plan.query_starts[-1]), int(plan.key_starts[-1])
    q, k, v = torch.randn(queries, 4, 8), torch.randn(keys, 2, 8), torch.randn(keys, 2, 8)
    torch.testing.assert_close(flash(q, k, v, plan, 0.3), KERNELS["stretches"](q, k, v, plan, 0.3))
    attention_kernels._flash_function.cache_clear()
