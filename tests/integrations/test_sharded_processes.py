"""Two processes with sharded parameters (FSDP2) train as two with parameters of their own."""

import os
import sys
from pathlib import Path

import accelerate.state as accelerate_state
import test_listwise_trainer as lists
import test_packed_processes as two
import tiny_lm
import torch
import two_processes
from accelerate.utils import DistributedType
from datasets import Dataset

from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer

SHARDS = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}
CASES = {
    "one step a rollout": ({}, two.Graded),
    "later steps": ({"num_iterations": 3}, two.Graded),
    "later steps, a dead rollout": ({"num_iterations": 2, **two.TWO_ROLLOUTS}, two.LastOneTied),
    "a process without members": ({"num_iterations": 2}, two.NoneHere),
    "a target that looks at the anchor": ({"prior_in_target": True}, two.NoneHere),
    "an automatic tau, measured by hand": ({"tau": "auto"}, two.FewerHere),
    "an automatic tau, measured on the way": ({"tau": "auto", "num_iterations": 2}, two.FewerHere),
}


def online(folder, options, reward):
    return two.trained(two.Ours, folder, reward, options)


def listwise(folder, options, _):
    trainer = ListwiseTrainer(
        tiny_lm.model(),
        ListwiseConfig(
            str(folder / "lists"),
            cache=str(
                folder / ("cache of shards" if "fsdp" in options else "cache")
            ),  # the reference, scored anew
            ddp_backend="gloo",
            **{**lists.COMMON, "per_device_train_batch_size": 2, "max_steps": 3, **options},
        ),
        Dataset.from_list(lists.ragged()),
        processing_class=tiny_lm.tokenizer(),
    )
    trainer.train()
    return two.flat(trainer.model)


def sharding_on_cpu():
    """Accelerate shards on accelerators alone: from here on it takes these processes for some."""
    accelerate_state.AcceleratorState._reset_state(reset_partial_state=False)
    accelerate_state.PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    made = accelerate_state.PartialState.__init__

    def init(self, *arguments, **options):
        made(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    accelerate_state.PartialState.__init__ = init


def worker(folder):
    start = two.flat(tiny_lm.model())
    cases = {name: (online, *case) for name, case in CASES.items()} | {"lists": (listwise, {}, None)}
    expected = {name: run(folder, options, reward) for name, (run, options, reward) in cases.items()}
    sharding_on_cpu()
    for name, (run, options, reward) in cases.items():
        found = run(folder, {**options, **SHARDS}, reward)
        assert accelerate_state.AcceleratorState().distributed_type == DistributedType.FSDP
        assert not torch.equal(found, start), f"{name}: nothing was learnt"
        off = float((found - expected[name]).abs().max())
        assert off < 2e-6, f"{name}: off by {off}"
        print(f"alike: {name};", flush=True)  # noqa: T201
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in its own time


def test_two_processes(tmp_path):
    tiny_lm.model().save_pretrained(tmp_path / "start")
    done = two_processes.run(__file__, tmp_path)
    for name in (*CASES, "lists"):
        assert done.stdout.count(f"alike: {name};") == 2, done.stderr[-3000:]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
