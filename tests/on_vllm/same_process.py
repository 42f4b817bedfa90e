"""Runs with vLLM in the trainer's process; each is a process of its own: ``same_process.py NAME FOLDER MODEL``.

vLLM for CPUs packs linear layers away when it loads them, and then takes no weights; here it keeps them. Its sleep
is empty; here it overwrites the weights, as on a GPU, where they are discarded.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from torch.nn import functional

AWAKE = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1, "vllm_max_model_length": 200}
ASLEEP = {**AWAKE, "vllm_enable_sleep_mode": True}
RUNS = {
    "adpo": ("adpo", {**AWAKE, "generation_kwargs": {"stop_token_ids": [2, 3]}}),
    "adpo, sleeping, an adapter": ("adpo", {**ASLEEP, "adapter": True}),
    "grpo": ("grpo", AWAKE),
    "grpo, sleeping": ("grpo", ASLEEP),
}
COMMANDS = {"adpo train": AWAKE, "adpo train, sleeping, an adapter": {**ASLEEP, "use_peft": True}}


def keep_weights():
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):
        layer.cpu_linear = functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def discard_weights_asleep(slept):
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self, level=1):
        slept.append(level)
        for weights in self.model_runner.get_model().parameters():
            weights.data.fill_(1.0)

    type(current_platform).is_sleep_mode_available = lambda self: True
    CPUWorker.sleep = sleep


def in_float32():
    """TRL leaves the precision to vLLM, which takes bfloat16; the trainer's is compared with it."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)


def main(name, folder, model):
    import rollouts

    import adpo.trainers.trl.rollout.vllm as needs

    slept = []
    keep_weights()
    discard_weights_asleep(slept)
    in_float32()
    needs.refuse_without_gpu = lambda _: None
    if name in RUNS:
        kind, options = RUNS[name]
        trainer = rollouts.made(kind, Path(folder), model, **options)
        trainer.train()
        found = rollouts.report(trainer)
    else:
        found = command(COMMANDS[name], Path(folder), model)
    sys.stdout.write("\n" + json.dumps({**found, "slept": slept}) + "\n")


def command(options, folder, model):
    from rollouts import command_line

    from adpo import cli

    sys.argv = ["adpo", *command_line(folder, model, truncated="keep", **options)]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
    return json.loads((folder / "out" / "summary.json").read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
