"""Rows that are packed do not see each other; models in which they would are not packed."""

import pytest
import torch

pytest.importorskip("transformers")

import small_models

from adpo.sampling.decoding_checks import why_not_decoded
from adpo.scoring.packed import packing_checks
from adpo.scoring.packed.packed_scoring import packed_seq_logp
from adpo.scoring.packed.packing import packed
from adpo.scoring.packed.packing_checks import why_not_packed
from adpo.scoring.padding import off_by_padding
from adpo.scoring.scorer import Forms, Scorer

PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8], [9], [10, 11]]
COMPLETIONS = [[12, 13, 14], [15], [16, 17, 18, 19, 20], [21, 22]]


@pytest.mark.parametrize("name", small_models.STATELESS)
@pytest.mark.parametrize("share", [True, False])
def test_a_row_is_the_same_beside_any_neighbour(name, share):
    model = small_models.made(name)
    assert why_not_packed(model) is None
    with torch.no_grad():
        together = packed_seq_logp(model, packed(PROMPTS, COMPLETIONS, share))
        backwards = packed_seq_logp(model, packed(PROMPTS[::-1], COMPLETIONS[::-1], share)).flip(0)
        alone = [packed_seq_logp(model, packed([p], [c])) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=2e-6)
    torch.testing.assert_close(backwards, torch.cat(alone), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", small_models.STATEFUL)
def test_layers_with_a_state_are_not_packed(name):
    """Fresh weights hide most of it: LFM2's rows differ by 3e-5 nats here, by half a nat when trained."""
    model = small_models.made(name)
    assert "carries a state from token to token" in why_not_packed(model)
    with pytest.raises(ValueError, match="scoring packed does not work with this model: it carries a state"):
        Scorer(model, Forms(scoring="packed"))
    assert why_not_decoded(model) is not None


@pytest.mark.parametrize("size", [2, 2048])
def test_attention_that_makes_a_mask_of_its_own_is_not_packed(size):
    """A plan is in the place of masks; fresh weights hide what is lost, by 0.7 nats a completion when trained."""
    model = small_models.made("doge", keep_window_size=size)
    assert why_not_packed(model) == "ValueError: DogeAttention makes a mask of its own: packed sequences have none"


@pytest.mark.parametrize("name", small_models.STATEFUL)
def test_a_trial_finds_the_state_without_knowing_the_layers(name, monkeypatch):
    model = small_models.made(name)
    monkeypatch.setattr(packing_checks, "_by_configuration", lambda *_: None)
    assert why_not_packed(model) == "what a row computes would depend on its neighbours"


class Shifted(torch.nn.Module):
    """A layer that adds the token before, or the one behind, times a gate."""

    def __init__(self, layer, gate, shift):
        super().__init__()
        self.layer, self.shift = layer, shift
        self.gate = torch.nn.Parameter(torch.tensor(gate))

    def forward(self, states, *arguments, **options):
        return self.layer(states + self.gate * states.roll(self.shift, 1), *arguments, **options)


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("gate", [0.0, 1e-4])
def test_a_gate_that_is_still_closed_does_not_hide_it(shift, gate):
    model = small_models.made("qwen3")
    model.model.layers[1] = Shifted(model.model.layers[1], gate, shift)
    assert why_not_packed(model) == "what a row computes would depend on its neighbours"


def test_windows_are_measured_by_the_length_a_model_is_stretched_to():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    assert why_not_packed(small_models.made("qwen3", rope_parameters=yarn)) is None
    windowed = small_models.made("qwen3", rope_parameters=yarn)
    windowed.config.sliding_window = 64
    assert why_not_packed(windowed) == "it attends through a window (sliding_window = 64)"


@pytest.mark.parametrize("name", small_models.STATELESS)
def test_what_is_decoded_over_a_fixed_cache(name):
    assert why_not_decoded(small_models.made(name)) is None


def test_what_is_not():
    reason = why_not_decoded(small_models.made("rwkv"))
    assert reason is not None
    assert "window" not in reason


@pytest.mark.parametrize("name", [*small_models.STATELESS, *small_models.STATEFUL])
def test_padding_on_the_left_is_masked_where_positions_are_given(name):
    assert off_by_padding(small_models.made(name), positions=True) == 0.0


def test_padding_on_the_left_moves_learned_positions_and_runs_through_a_state():
    assert off_by_padding(small_models.made("gpt2")) > 0.01
    assert off_by_padding(small_models.made("llama")) == 0.0
    assert off_by_padding(small_models.made("rwkv"), positions=True) > 0.01
