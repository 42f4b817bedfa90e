"""Under DeepSpeed's engine the trainers train as without it: ZeRO 1 and 2, in one process and in two."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_listwise_trainer as lists
import test_packed_processes as two
import tiny_lm
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset

from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer
from adpo.trainers.trl import ADPOConfig, TrainingStoppedError


class FirstOneTied(two.LastOneTied):
    __name__ = "first_one_tied"

    def __init__(self):
        self.calls = 1


ADAM = {"optim": "adamw_torch", "learning_rate": 0.001}
CASES = {
    "one step a rollout": ({}, two.Graded),
    "later steps": ({"num_iterations": 3}, two.Graded),
    "passes of one row": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, two.Graded),
    "two rollouts a step": (two.TWO_ROLLOUTS, two.Graded),
    "a rollout of two without gradient": (two.TWO_ROLLOUTS, two.LastOneTied),
    "a rollout of two without members": (two.TWO_ROLLOUTS, two.LastOneMissing),
    "a process without members": ({"num_iterations": 2}, two.NoneHere),
    "an automatic tau": ({"tau": "auto", "num_iterations": 2}, two.FewerHere),
    "optimizer on the CPU, two rollouts": (two.TWO_ROLLOUTS, two.LastOneTied),
    "clipped": ({"max_grad_norm": 0.01}, two.Graded),
    "adam, every second rollout without gradient": ({**ADAM, "num_iterations": 1}, two.LastOneTied),
    "adam, no gradient to begin with": ({**ADAM, "num_iterations": 1}, FirstOneTied),
    "adam on the CPU, every second rollout without gradient": ({**ADAM, "num_iterations": 1}, two.LastOneTied),
    "adam": (ADAM, two.Graded),
}


OFFLOADED = (
    "optimizer on the CPU, two rollouts",
    "adam on the CPU, every second rollout without gradient",
)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def engine(stage, offload_optimizer=None, **more):
    offload = {} if offload_optimizer is None else {"offload_optimizer": offload_optimizer}
    return {
        "zero_optimization": {"stage": stage, **offload},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        **more,
    }


def fresh():
    AcceleratorState._reset_state(reset_partial_state=False)


def online(folder, options, reward, kind=two.Ours):
    fresh()
    two.CONFIGS.setdefault(kind, ADPOConfig)
    return two.trained(kind, folder, reward, options)


def listwise(folder, options, _):
    fresh()
    given = {**lists.COMMON, "per_device_train_batch_size": 2, "max_steps": 3, **options}
    name = "cache of engines" if "deepspeed" in options else "cache"
    trainer = ListwiseTrainer(
        tiny_lm.model(),
        ListwiseConfig(str(folder / "lists"), cache=str(folder / name), ddp_backend="gloo", **given),
        Dataset.from_list(lists.ragged()),
        processing_class=tiny_lm.tokenizer(),
    )
    trainer.train()
    return two.flat(trainer.model)


class Broken(two.Ours):
    """Log-probabilities that are not numbers before the second and the third step."""

    bad_steps = (1, 2)

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        plain = self.row_scorer.logp

        def logp(model, rows):
            bad = torch.is_grad_enabled() and self.state.global_step in self.bad_steps
            return plain(model, rows) * (math.nan if bad else 1.0)

        self.row_scorer.logp = logp


def refused(folder, stage):
    """Steps that are not finite move nothing, and the next one is made."""
    for precision, more in (("float32", {}), ("bfloat16", {}), ("float32", OFFLOAD)):
        options = {"num_iterations": 1, "optim": "adamw_torch", "learning_rate": 0.01}
        options["bf16"] = precision == "bfloat16"
        options["deepspeed"] = engine(stage, **more, bf16={"enabled": "auto"})
        one, three, four = (
            online(folder, {**options, "max_steps": steps}, two.Graded, kind)
            for steps, kind in ((1, two.Ours), (3, Broken), (4, Broken))
        )
        assert torch.equal(one, three), precision
        assert not torch.equal(one, four), precision
        assert torch.isfinite(four).all(), precision


def refused_for_good(folder, stage):
    class Always(Broken):
        bad_steps = range(1, 9)

    options = {"num_iterations": 1, "max_steps": 9, "max_refused_steps": 2, "deepspeed": engine(stage)}
    with pytest.raises(TrainingStoppedError, match="2 optimizer steps in a row"):
        online(folder, options, two.Graded, Always)


def resumed(folder, stage):
    """A run stopped after two steps and resumed ends where the whole one does."""
    options = {"num_iterations": 1, "optim": "adamw_torch", "learning_rate": 0.01, "deepspeed": engine(stage)}

    def run(name, resume=None, **more):
        fresh()
        given = {
            "ddp_backend": "gloo",
            "per_device_train_batch_size": 4,
            **two.packs.ARGUMENTS,
            **options,
            "max_steps": 4,
            **more,
        }
        trainer = two.Ours(
            model=str(folder / "start"),
            reward_funcs=two.Graded(),
            args=ADPOConfig(str(folder / name), model_init_kwargs={"dtype": "float32"}, **given),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in two.online.PROMPTS] * 4),
            processing_class=tiny_lm.tokenizer(),
        )
        trainer.train(resume_from_checkpoint=resume)
        return two.flat(trainer.model)

    whole = run("whole")
    run("parts", save_strategy="steps", save_steps=2)
    shutil.rmtree(folder / "parts" / "checkpoint-4", ignore_errors=True)
    found = run("parts", str(folder / "parts" / "checkpoint-2"))
    off = float((found - whole).abs().max())
    assert off < 1e-6, off


MORE = {"refused steps": refused, "refused for good": refused_for_good, "resumed": resumed}


def grpo(folder, options, reward):
    return online(folder, {"loss_type": "dapo", **options}, reward, two.Fast)


OTHERS = {
    "TRL's loss": (grpo, {}, two.Graded),
    "TRL's loss, two rollouts": (grpo, two.TWO_ROLLOUTS, two.Graded),
    "lists": (listwise, {}, None),
    "lists, accumulated": (listwise, {"gradient_accumulation_steps": 2}, None),
    "lists, cut": (listwise, {"completions_per_pass": 2}, None),
}


def worker(folder, stage):
    start = two.flat(tiny_lm.model())
    cases = {name: (online, *case) for name, case in CASES.items()} | OTHERS
    expected = {name: run(folder, options, reward) for name, (run, options, reward) in cases.items()}
    for name, (run, options, reward) in cases.items():
        more = OFFLOAD if name in OFFLOADED else {}
        found = run(folder, {**options, "deepspeed": engine(stage, **more)}, reward)
        assert AcceleratorState().deepspeed_plugin.zero_stage == stage
        assert not torch.equal(found, start), f"{name}: nothing was learnt"
        off = float((found - expected[name]).abs().max())
        print(f"{'alike' if off < 2e-6 else 'OFF'}: {name}; off by {off:.2g}", flush=True)  # noqa: T201
    for name, check in MORE.items():
        check(folder, stage)
        print(f"alike: {name};", flush=True)  # noqa: T201
    os._exit(0)  # gloo's threads may abort a process that ends in its own time


def run(folder, processes, stage):
    tiny_lm.model().save_pretrained(folder / "start")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    paths = os.pathsep.join([*map(str, Path(tiny_lm.__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*launcher, __file__, str(folder), str(stage)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_as_without_it(tmp_path, processes, stage):
    done = run(tmp_path, processes, stage)
    for name in (*CASES, *OTHERS, *MORE):
        assert done.stdout.count(f"alike: {name};") == processes, done.stdout + done.stderr[-3000:]


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]))
