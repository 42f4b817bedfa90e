"""What verl's worker can be combined with: parameters after eight steps on two ranks beside `adpo.exact` alone.

Two rollouts of two mini-batches and two epochs; verl scores each, as its trainer does, with and without adapter.
"""

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from processes import environment
from updates import RATE, dealt_rows, distance, expected, logits_of, made_up, rows_of, to_train, whole, worker_of

RANKS, ROLLOUTS = 2, 2
EXACT = 5e-6
"""Of parameters that move by a hundredth and more."""
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
HALF = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


class Case(NamedTuple):
    model: str = "qwen3"
    options: tuple = ()  # of HFModelConfig
    engine: tuple = ()  # of FSDPEngineConfig
    loss: tuple = ()  # of ADPOPolicyLoss
    share: float = 0.0  # of the way that parameters may be off, where precision is not float32
    holes: bool = False
    temperature: float = 1.0
    entropy: bool = False
    rate: float = RATE


def case(model="qwen3", options=(), engine=(), loss=(), **more):
    given = (tuple(dict(each).items()) for each in (options, engine, loss))
    return Case(model, *given, **more)


PACKED = {"use_remove_padding": True}
FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
EAGER = {"override_config": {"attn_implementation": "eager"}}
CASES = {
    "LoRA": case(options=LORA),
    "LoRA, fixed anchor": case(options=LORA, loss={"anchor": "fixed", "divergence": "reverse_kl"}),
    "LoRA, packed, FSDP1": case(options={**LORA, **PACKED}, engine={"strategy": "fsdp", "use_orig_params": True}),
    "FSDP1": case(engine={"strategy": "fsdp"}),
    "replicas": case(engine={"fsdp_size": 1}),
    "gradient checkpointing": case(options={"enable_gradient_checkpointing": True}),
    "torch.compile": case(options=PACKED, engine={"use_torch_compile": True}, entropy=True),
    "bf16": case(engine={"mixed_precision": HALF}, share=0.1),
    "fp16": case(engine={"mixed_precision": {**HALF, "param_dtype": "fp16"}}, share=0.05),
    "bf16 weights": case(engine={"model_dtype": "bf16", "mixed_precision": HALF}, share=0.3),
    "packed": case(options=PACKED, engine={"micro_batch_size_per_gpu": 4, "infer_micro_batch_size_per_gpu": 4}),
    "dynamic micro-batches": case(
        options=PACKED,
        engine={"use_dynamic_bsz": True, "max_token_len_per_gpu": 24, "infer_max_token_len_per_gpu": 30},
    ),
    "tokens the model did not write": case(holes=True),
    "tokens the model did not write, mean": case(
        holes=True, options=PACKED, loss={"logp_reduction": "mean", "tau": 0.5}
    ),
    "temperature": case(temperature=0.7),
    "sliding window": case("mistral"),
    "sliding window, packed": case("mistral", options=PACKED, engine={"micro_batch_size_per_gpu": 4}),
    "experts": case("qwen3_moe"),
    "hybrid": case("lfm2", engine={"micro_batch_size_per_gpu": 4}),
    "state space (Mamba 2)": case("mamba2", options=EAGER, engine={"micro_batch_size_per_gpu": 4}),
    "state space (RWKV)": case("rwkv", options=EAGER, engine={"micro_batch_size_per_gpu": 4}, rate=3e-4),
    "rope scaling": case("yarn"),
    "dropout": case("dropout"),
    "fused kernels": case(engine={"strategy": "fsdp"}, options=FUSED),
}
REFUSED = {
    "packed hybrid": ("carries a state", case("lfm2", options=PACKED)),
    "packed Mamba 2": ("carries a state", case("mamba2", options={**PACKED, **EAGER})),
    "packed RWKV": ("rows reach their neighbours", case("rwkv", options={**PACKED, **EAGER})),
    "fused kernels on FSDP2": ("use_fused_kernels", case(options=FUSED)),
}
ENDED = "every case was run;"


def worker(folder):
    import cpu_platform  # noqa: F401  gives gloo in place of what verl asks for

    for name, one in CASES.items():
        try:
            found = run(folder, one)
        except Exception:
            found = traceback.format_exc()
            print(name, found, flush=True)  # noqa: T201
        if os.environ["RANK"] == "0":
            torch.save(found, folder / f"{name}.pt")
    for name, (_, one) in REFUSED.items():
        try:
            made(folder, one)
            message = "nothing"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        if os.environ["RANK"] == "0":
            torch.save(message, folder / f"{name}.pt")
    print(ENDED, flush=True)  # noqa: T201
    os._exit(0)


def made(folder, one):
    from adpo.trainers.verl.settings import ADPOPolicyLoss

    torch.manual_seed(3)  # of a new adapter
    return worker_of(folder / one.model, ADPOPolicyLoss(**dict(one.loss)), one.options, one.engine, one.rate)


def run(folder, one):
    """Parameters before and after, entropies of the first rollout, and what it logged."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    rank = int(os.environ["RANK"])
    mine = dealt_rows(rank, RANKS)
    actor = made(folder, one)
    before, entropy, logged = whole(actor), [], []

    def scored(**options):
        data = rows_of(mine, one.holes, one.temperature)
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=one.entropy, **options)
        found = actor.infer_batch(data)
        if one.entropy:
            entropy.append(response_from_nested(found["entropy"], data["response_mask"]).unbind())
        return response_from_nested(found["log_probs"], data["response_mask"])

    for _ in range(ROLLOUTS):
        data = rows_of(mine, one.holes, one.temperature)
        data["old_log_probs"] = scored()
        if ("anchor", "fixed") in one.loss:
            data["ref_log_prob"] = scored(no_lora_adapter=True)
        logged.append(actor.train_mini_batch(to_train(data, RANKS))["metrics"])
    compiled = torch._dynamo.utils.counters["frames"].get("ok", 0)
    return {
        "before": before,
        "after": whole(actor),
        "entropy": list(zip(mine, entropy[0], strict=True)) if entropy else [],
        "logged": logged,
        "compiled": compiled,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    for name in {one.model for one in [*CASES.values(), *(one for _, one in REFUSED.values())]}:
        tiny.save(folder / name, tiny.KINDS[name]())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    done = subprocess.run(
        [*command, str(Path(__file__)), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=environment(),
    )
    (folder / "log").write_text(done.stdout + done.stderr)
    return folder


def result(folder, name):
    path = folder / f"{name}.pt"
    assert path.exists(), (folder / "log").read_text()[-3000:]
    return torch.load(path, weights_only=False)


def policy_of(one, found):
    """In this process, with the parameters that verl's began with."""
    model = tiny.KINDS[one.model]()
    if "lora_rank" in dict(one.options):
        adapter = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
        model = get_peft_model(model, adapter)
    missing = model.load_state_dict(found["before"], strict=False)
    assert not missing.unexpected_keys
    return model.eval() if one.model == "dropout" else model  # RWKV keeps other weights for it


@pytest.mark.parametrize("name", CASES)
def test_parameters(results, name):
    from adpo.trainers.verl.settings import ADPOPolicyLoss

    one, found = CASES[name], result(results, name)
    assert not isinstance(found, str), found
    policy = policy_of(one, found)
    before = {key: value.detach().clone() for key, value in policy.named_parameters()}
    other = tiny.KINDS[one.model]().eval()
    settings = ADPOPolicyLoss(**dict(one.loss))
    how = {"holes": one.holes, "temperature": one.temperature, "rate": one.rate}
    expected(settings, policy, other, rollouts=ROLLOUTS, **how)
    after = dict(policy.named_parameters())
    moved, off = distance(before, after), distance(found["after"], after)
    assert moved > 5e-3, "nothing was learnt"
    if one.share:
        assert EXACT < off < one.share * moved, f"off by {off / moved:.3g} of the way"
    else:
        assert off < EXACT, f"off by {off}, moved by {moved}"
    for logged in found["logged"]:
        assert logged["adpo/scored"] == [0.0, 1.0, 1.0, 1.0]
    if "lora_rank" in dict(one.options):
        still = {key for key in before if torch.equal(found["after"][key], found["before"][key])}
        assert still == {key for key in before if "lora_" not in key}


def test_what_torch_compiles_is_the_entropy(results):
    found = result(results, "torch.compile")
    assert found["compiled"] > 0
    policy = policy_of(CASES["torch.compile"], found)
    prompts, responses, *_ = made_up()
    rows = [(row, entropy) for row, entropy in found["entropy"] if row < len(prompts)]
    assert rows
    for row, entropy in rows:
        logp = logits_of(policy, prompts[row], responses[row]).log_softmax(-1)
        torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_first_rollout(results, name):
    message, _ = REFUSED[name]
    assert re.fullmatch(f"ValueError: .*{message}.*: set actor_rollout_ref.+", result(results, name))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
