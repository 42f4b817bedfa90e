"""On a GPU, in the precisions and by the kernels that are used there, the same models are packed and refused."""

import pytest
import torch

pytest.importorskip("transformers")

import small_models

from adpo.sampling.decoding_checks import why_not_decoded
from adpo.scoring.packed.attention_kernels import why_not
from adpo.scoring.packed.packing_checks import why_not_packed
from adpo.scoring.padding import off_by_padding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDE = {"head_dim": 16, "hidden_size": 64}


def made(name, dtype):
    options = WIDE if "head_dim" in small_models.STATELESS.get(name, {}) else {"hidden_size": 64}
    return small_models.made(name, **options).to("cuda", dtype)


@pytest.mark.parametrize("name", small_models.STATELESS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["varlen", "flex", "stretches"])
def test_models_without_a_state_are_packed(name, dtype, kernel):
    device = torch.device("cuda")
    if why_not(kernel, device, dtype, 16) is not None:
        pytest.skip("no such kernel for this precision")
    assert why_not_packed(made(name, dtype), None, kernel) is None


@pytest.mark.parametrize("name", small_models.STATELESS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_and_decoded(name, dtype):
    assert why_not_decoded(made(name, dtype)) is None
    assert off_by_padding(made(name, dtype), positions=True) == 0.0


@pytest.mark.parametrize("name", ["lfm2", "jamba", "falcon_h1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_with_a_state_are_not(name, dtype, monkeypatch):
    from adpo.scoring.packed import packing_checks

    model = small_models.made(name).to("cuda", dtype)
    assert "carries a state" in why_not_packed(model)
    monkeypatch.setattr(packing_checks, "_by_configuration", lambda *_: None)
    assert why_not_packed(model, None, "stretches") == "what a row computes would depend on its neighbours"
