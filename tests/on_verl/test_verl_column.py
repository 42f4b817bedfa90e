"""The column `verl` of `docs/support.md`: its tests are there, and what it refuses is refused in those words."""

import ast
import json
import re
from pathlib import Path

import pytest
import tiny
import torch
from test_settings import LOSS, config
from verl.workers.config import HFModelConfig

from adpo.trainers.verl.models import check_model
from adpo.trainers.verl.resume import check_processes
from adpo.trainers.verl.settings import check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "support.md").read_text()
COLUMN = [line.strip("| ").split(" | ")[-1] for line in re.findall(r"^\| .+", PAGE, re.M)]
LINK = re.compile(r"\[works\]\(\.\./(tests/on_verl/(\w+)\.py) '(\w+)(?:\[(.+)\])?'\)")
MESSAGES = dict(re.findall(r"^### ([\w-]+)\n\n`(.+)`$", PAGE, re.M))
MODEL, ROLLOUT, ACTOR = (f"actor_rollout_ref.{part}" for part in ("model", "rollout", "actor"))


def checked(**changed):
    return lambda _: check(config(**changed))


def of_model(kind, **more):
    """A model whose configuration says more than its weights need."""

    def look(folder):
        tiny.save(folder, tiny.KINDS[kind]())
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **more}))
        check_model(HFModelConfig(path=str(folder), override_config={"attn_implementation": "sdpa"}))

    return look


def resumed(folder):
    place = folder / "global_step_4" / "actor"
    place.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    for rank in range(8):
        (place / f"model_world_size_8_rank_{rank}.pt").touch()
        (place / f"optim_world_size_8_rank_{rank}.pt").touch()
    options = {"trainer.default_local_dir": str(folder), "trainer.resume_mode": "auto"}
    check_processes(config(**options, **{"trainer.nnodes": "1"}))  # of 8 processes each
    check_processes(config(**{**options, "trainer.resume_mode": "disable"}))
    check_processes(config(**options))


REFUSED = {
    "verl-strategy": checked(**{f"{ACTOR}.strategy": "megatron"}),
    "verl-adapters": checked(**{f"{MODEL}.lora.rank": "8", f"{MODEL}.lora.type": "dora"}),
    "verl-quantised": of_model(
        "qwen3", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    "verl-liger": checked(**{f"{MODEL}.use_liger": "true"}),
    "verl-routing-replay": checked(**{f"{ROLLOUT}.enable_rollout_routing_replay": "true"}),
    "verl-repetition-penalty": checked(**{f"+{ROLLOUT}.repetition_penalty": "1.1"}),
    "router-loss": of_model("qwen3_moe", output_router_logits=True),
    "vision": of_model("qwen3", vision_config={}),
    "other-processes": resumed,
}


@pytest.mark.parametrize("label", REFUSED)
def test_what_is_refused_says_what_the_page_says(label, tmp_path):
    with pytest.raises(ValueError, match=r".") as refusal:
        REFUSED[label](tmp_path)
    pattern = ".+".join(re.escape(part) for part in MESSAGES[label].split("…"))
    assert re.fullmatch(pattern + (".*" if MESSAGES[label].endswith("…") else ""), str(refusal.value))


def test_every_refusal_of_the_column_is_provoked():
    assert {text.split("#")[1].rstrip(")") for text in COLUMN if text.startswith("[refused]")} == set(REFUSED)


def test_every_test_of_the_column_is_there():
    """With its case, which is a string that the file has or makes."""
    links = [LINK.fullmatch(text) for text in COLUMN if text.startswith("[works")]
    assert len(links) > 20
    assert all(links)
    for file, _, function, parameters in {link.groups() for link in links}:
        tree = ast.parse((ROOT / file).read_text())
        strings = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body), function
        assert parameters is None or parameters in strings, parameters


NOT_TAKEN = {
    "DoRA is not to be had": {f"{MODEL}.lora.rank": "8"},
    "would anchor to the model without that adapter": {
        f"+{LOSS}.anchor": "fixed",
        f"{ACTOR}.use_kl_loss": "true",
        f"{ACTOR}.kl_loss_coef": "0",
        f"{MODEL}.lora_adapter_path": "adapter",
    },
    "impl_backend must be torch; got triton": {
        f"{MODEL}.use_fused_kernels": "true",
        f"{MODEL}.fused_kernel_options.impl_backend": "triton",
    },
    "router_replay.mode": {f"+{ACTOR}.router_replay.mode": "R2"},
    "model.enable_activation_offload must be false": {f"{MODEL}.enable_activation_offload": "true"},
    "algorithm.filter_groups.enable must be false": {"algorithm.filter_groups.enable": "true"},
    "qat.enable must be false": {f"{ACTOR}.qat.enable": "true"},
    "replicas of FSDP1 would not average gradients": {
        f"{ACTOR}.strategy": "fsdp",
        f"{ACTOR}.fsdp_config.fsdp_size": "1",
    },
    "mtp.enable must be false": {f"{MODEL}.mtp.enable": "true"},
    "got attn_implementation=sdpa, which would attend within each rank's part": {
        f"{ACTOR}.ulysses_sequence_parallel_size": "2",
        f"+{MODEL}.override_config.attn_implementation": "sdpa",
    },
    "needs model.use_remove_padding and flash attention": {
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": "2",
        f"{MODEL}.use_remove_padding": "false",
    },
}


@pytest.mark.parametrize("complaint", NOT_TAKEN)
def test_what_verl_would_leave_out_is_refused(complaint):
    with pytest.raises(ValueError, match=complaint):
        check(config(**NOT_TAKEN[complaint]))


def test_sequence_parallelism_leaves_fewer_ranks_for_rows():
    """Sixteen processes are two parts of the rows with sequences in eight, wherever verl is given that."""
    place = {"trainer.nnodes": "2", f"{ACTOR}.ppo_mini_batch_size": "1", f"{ROLLOUT}.n": "2"}
    for key in (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"):
        check(config(**place, **{key: "8"}))
    with pytest.raises(ValueError, match="cannot be divided by 16 ranks"):
        check(config(**place))


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 16), ("longrope", 8)])
def test_positions_do_not_depend_on_other_rows(tmp_path, kind, limit):
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    model = tiny.model_of("qwen3", head_dim=16, max_position_embeddings=16, rope_parameters=rope).eval()
    tiny.save(tmp_path, model)
    row = torch.arange(5, 5 + limit + 1)[None]
    with torch.no_grad():
        alone, within, beyond = (model(row[:, :length]).logits[:, :4] for length in (4, limit, limit + 1))
    torch.testing.assert_close(within, alone)
    assert not torch.allclose(beyond, alone, atol=1e-4)  # which is what the refusal is about
    settings = HFModelConfig(path=str(tmp_path), override_config={"attn_implementation": "sdpa"})
    check_model(settings, limit)
    with pytest.raises(ValueError, match=f"beyond {limit} tokens .* of a micro-batch .rope_type = {kind}."):
        check_model(settings, limit + 1)


def test_fused_kernels_do_not_change_logits(tmp_path):
    tiny.save(tmp_path)
    options = {"attn_implementation": "sdpa", "final_logit_softcapping": 30.0}
    check_model(HFModelConfig(path=str(tmp_path), override_config=options))
    with pytest.raises(ValueError, match=r"use_fused_kernels would leave out .*final_logit_softcapping = 30"):
        check_model(HFModelConfig(path=str(tmp_path), override_config=options, use_fused_kernels=True))
