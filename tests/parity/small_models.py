"""Causal language models of other makes, of a few thousand weights each, drawn on the spot."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

STATELESS = {
    "llama": {},
    "qwen3": {},
    "gpt_neox": {},
    "gpt2": {"n_positions": 64, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
}
STATEFUL = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1},
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "head_dim": 8},
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8},
        **{"mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1},
    },
}
OTHERS = {"doge": {}, "opt": {}, "mixtral": {}}
READS_PADDING = {"rwkv": {"attention_hidden_size": 32}}


def made(name, **options):
    given = {**STATELESS, **STATEFUL, **OTHERS, **READS_PADDING}[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SIZES, **given, **options})).eval()
