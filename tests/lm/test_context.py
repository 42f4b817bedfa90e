"""How long a sequence may be, by configurations as models on the hub have them."""

import pytest

pytest.importorskip("transformers")

from transformers import AutoConfig, GPT2Config

from adpo.scoring.context import context_length, longest_row


def config(kind, written, **rope):
    return AutoConfig.for_model(kind, max_position_embeddings=written, rope_parameters=rope or None)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
LLAMA = {"rope_type": "llama3", "original_max_position_embeddings": 8192, "rope_theta": 5e5}
LLAMA |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "rope_theta": 1e4, "factor": 32.0}
LONG |= {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}


@pytest.mark.parametrize(
    ("kind", "written", "rope", "expected"),
    [
        ("qwen3", 40960, {}, 40960),
        ("qwen3", 40960, {"rope_type": "default", "rope_theta": 1e6}, 40960),
        ("qwen3", 40960, YARN, 131072),  # Qwen3 with the scaling its card recommends
        ("qwen2", 131072, YARN, 131072),  # written already stretched
        ("llama", 131072, {**LLAMA, "factor": 8.0}, 131072),  # Llama 3.1
        ("llama", 131072, {**LLAMA, "factor": 32.0}, 131072),  # Llama 3.2: its factor says more than it can
        ("phi3", 131072, LONG, 131072),  # Phi 3 mini 128k
        ("llama", 4096, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 16384),
        ("llama", 4096, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 8192),
        ("gemma3_text", 131072, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, 131072),
        ("deepseek_v3", 163840, {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096}, 163840),
    ],
)
def test_rotary_positions(kind, written, rope, expected):
    assert context_length(config(kind, written, **rope)) == expected


@pytest.mark.parametrize(
    ("kind", "written", "rope", "expected"),
    [
        ("phi3", 131072, LONG, 4096),
        ("llama", 4096, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 4096),
        ("qwen3", 40960, YARN, 131072),
    ],
)
def test_rows_end_where_positions_would_depend_on_their_neighbours(kind, written, rope, expected):
    assert longest_row(config(kind, written, **rope)) == expected


def test_a_scaling_for_each_type_of_layers():
    ropes = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert (
        context_length(AutoConfig.for_model("qwen3", rope_parameters=ropes, max_position_embeddings=40960))
        == 131072
    )


def test_learned_positions_end_where_their_table_ends():
    assert context_length(GPT2Config(n_positions=256)) == 256


def test_no_limit_where_none_is_named():
    assert context_length(AutoConfig.for_model("mamba")) is None
    assert context_length(AutoConfig.for_model("bloom")) is None


def test_of_the_language_model_in_a_model_of_several():
    whole = AutoConfig.for_model("qwen2_5_vl", text_config={"max_position_embeddings": 777})
    assert context_length(whole) == 777
