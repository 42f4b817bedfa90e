"""Every fast form on a CUDA device against padded rows with all their logits (``pytest -m gpu``)."""

import pytest
import torch

pytest.importorskip("transformers")

import test_head
import test_packed

from adpo.scoring.compiled import CompiledLayers
from adpo.scoring.fused_head import fused_token_scores, token_scores, weighted_token_logp
from adpo.scoring.packed.attention_kernels import prepared, why_not
from adpo.scoring.packed.packed_scoring import packed_seq_logp, packed_weighted_logp
from adpo.scoring.packed.packing import packed
from adpo.scoring.packed.packing_checks import why_not_packed
from adpo.scoring.scorer import Forms, Scorer
from adpo.scoring.sequences import seq_logp, sequences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.02}  # of log-probabilities of whole rows


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize("shape", [(1, 16, 50), (70, 64, 5000)], ids=str)
def test_output_layer(shape, chunk, dtype):
    hidden, weight, targets, bias = (
        value.detach().cuda() for value in test_head.case(*shape, torch.float32, bias=True)
    )
    leaves = [value.to(dtype).requires_grad_() for value in (hidden, weight, bias)]
    above = torch.randn(2, shape[0], device="cuda")
    wide = [value.detach().float().requires_grad_() for value in leaves]
    right = token_scores(wide[0], wide[1], targets, wide[2], 0.7)
    plain = token_scores(leaves[0], leaves[1], targets, leaves[2], 0.7)
    fused = fused_token_scores(leaves[0], leaves[1], targets, leaves[2], 0.7, chunk=chunk)
    total, logp = weighted_token_logp(leaves[0], leaves[1], targets, above[0], leaves[2], 0.7, chunk=chunk)
    slack = 1e-4 if dtype == torch.float32 else 0
    for mine, theirs, truth in zip((*fused, logp), (*plain, plain.logp), (*right, right.logp), strict=True):
        assert (mine - truth).abs().max() <= 2 * (theirs - truth).abs().max() + slack
    pairs = [(above[0] * scores.logp + 0.3 * above[1] * scores.entropy).sum() for scores in (fused, plain, right)]
    known = [total, (above[0] * plain.logp).sum(), (above[0] * right.logp).sum()]
    for mine, theirs, truth in (pairs, known):
        truths = torch.autograd.grad(truth, wide, retain_graph=True)
        others = torch.autograd.grad(theirs, leaves, retain_graph=True)
        found = torch.autograd.grad(mine, leaves, retain_graph=True)
        for one, other, exact in zip(found, others, truths, strict=True):
            assert (one - exact).norm() <= 1.5 * (other - exact).norm() + 1e-4 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", [None, "flex", "flash"])
def test_packed_rows(kind, share, compiled, dtype, kernel):
    width = 8 if kernel is None else 64  # others take no narrow heads
    if kernel is not None and (reason := why_not(kernel, torch.device("cuda"), dtype, width)):
        pytest.skip(reason)
    plain, other = (test_packed.model(kind, width).cuda().to(dtype) for _ in range(2))
    truth = test_packed.model(kind, width).cuda().to(dtype).float()
    if compiled:
        CompiledLayers(other)
    for seed in range(3):
        prompts, completions = test_packed.lists(seed, groups=seed + 2)
        rows = type(sequences([[1]], [[2]], 0))(*(part.cuda() for part in sequences(prompts, completions, pad=0)))
        batch = packed(prompts, completions, share).to(torch.device("cuda"))
        batch = batch if kernel is None else batch._replace(plan=prepared(batch.plan, kernel))
        weights = torch.randn(len(prompts), dtype=torch.float64, device="cuda")
        for model in (plain, other, truth):
            model.zero_grad()
        expected, right = seq_logp(plain, rows), seq_logp(truth, rows)
        found = packed_seq_logp(other, batch)
        assert (found - expected).abs().max() < CLOSE[dtype]
        (expected * weights).sum().backward()
        (right * weights).sum().backward()
        (found * weights).sum().backward()
        first = [parameter.grad.clone() for parameter in other.parameters()]
        other.zero_grad()
        total, logp = packed_weighted_logp(other, batch, weights)
        total.backward()
        assert (logp - expected).abs().max() < CLOSE[dtype]
        for gradients in (first, [parameter.grad for parameter in other.parameters()]):
            off = _distance(gradients, truth)
            assert off <= 1.5 * _distance([p.grad for p in plain.parameters()], truth) + 1e-4


def _distance(gradients, truth):
    """Relative to the gradient in float32."""
    pairs = list(zip(gradients, (parameter.grad for parameter in truth.parameters()), strict=True))
    off = sum((mine.float() - right).square().sum() for mine, right in pairs).sqrt()
    return float(off / sum(right.square().sum() for _, right in pairs).sqrt())


def test_a_gpu_packs_and_compiles_by_itself():
    model = test_packed.model("qwen3").cuda().bfloat16()
    assert why_not_packed(model) is None
    scorer = Scorer(model, Forms())
    assert "variable-length attention" in scorer.chosen()
    assert "layers compiled" in scorer.chosen()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_passes_without_gradient_round_as_those_of_training(dtype):
    """Else the log-ratio of a policy that has not moved would not be zero."""
    model = test_packed.model("qwen3").cuda().to(dtype)
    scorer = Scorer(model, Forms(scoring="packed", compile_layers=True))
    rows = sequences(*test_packed.lists(2, groups=8), pad=0)
    rows = type(rows)(*(part.cuda() for part in rows))
    trained = scorer.logp(model, rows)
    assert trained.requires_grad
    with torch.no_grad():
        scored = scorer.logp(model, rows)
        tokens = scorer.tokens(model, rows).logp
    assert not scored.requires_grad
    assert torch.equal(scored, trained)
    torch.testing.assert_close(tokens.double().sum(1), trained.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("kernel", "settled"), [("varlen", 1), ("flex", 2)])
def test_no_number_of_tokens_compiles_anew(kernel, settled):
    from torch._dynamo.utils import counters

    model = test_packed.model("qwen3", width=64).cuda().bfloat16()
    torch._dynamo.reset()
    layers = CompiledLayers(model)
    seen = []
    for seed in range(6):
        batch = packed(*test_packed.lists(seed, groups=seed + 2)).to(torch.device("cuda"))
        batch = batch._replace(plan=prepared(batch.plan, kernel))
        packed_seq_logp(model, batch).sum().backward()
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[settled] == seen[-1], seen  # for FlexAttention one block is another graph than several
    assert layers.why_not is None


def test_the_budget_is_found_and_kept():
    model = test_packed.model("qwen3").cuda().bfloat16()
    scorer = Scorer(model, Forms())
    rows = type(sequences([[1]], [[2]], 0))(
        *(part.cuda() for part in sequences(*test_packed.lists(1, groups=8), pad=0))
    )
    scorer.budget.begin(int(rows.attention_mask.sum()))
    scorer.logp(model, rows).sum().backward()
    scorer.budget.end()
    assert scorer.budget.bytes_per_token > 0
    assert scorer.budget.settle()
    assert scorer.budget.tokens == 32768  # a tiny model leaves room for more than help
