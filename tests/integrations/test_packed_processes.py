"""Two processes on packed rows: however many rows, passes or members they have, they train as on padded rows."""

import os
import sys
from pathlib import Path

import test_packed_online as packs
import test_trl_online as online
import tiny_lm
import torch
import two_processes
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

RANK = int(os.environ.get("RANK", "0"))


class Ragged:
    """Long completions in one process, short ones in the other."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        first = 100 * self.accelerator.process_index
        longest = 1 if self.accelerator.process_index else online.LENGTH
        found = [online.completion(self.state.global_step, first + row) for row in range(len(prompt_ids))]
        return [[*row[: longest - 1], 1] for row in found], None


class Stock(Ragged, GRPOTrainer):
    """TRL's own."""


class Fast(Ragged, FastGRPOTrainer):
    """TRL's losses on packed rows."""


class Ours(Ragged, ADPOTrainer):
    """ADPO."""


class Graded:
    """Rewards that differ from row to row and process to process."""

    __name__ = "graded"

    def __call__(self, completions, **_):
        return [float((7 * row + RANK) % 5) for row in range(len(completions))]


class LastOneTied(Graded):
    """Every second rollout has nothing to say."""

    __name__ = "last_one_tied"

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **rest):
        self.calls += 1
        return super().__call__(completions, **rest) if self.calls % 2 else [1.0] * len(completions)


class LastOneMissing(LastOneTied):
    """Every second rollout has no rewards."""

    __name__ = "last_one_missing"

    def __call__(self, completions, **rest):
        found = super().__call__(completions, **rest)
        return found if self.calls % 2 else [None] * len(completions)


class NoneHere(Graded):
    """The second process has no rewards."""

    __name__ = "none_here"

    def __call__(self, completions, **rest):
        return [None] * len(completions) if RANK else super().__call__(completions, **rest)


class FewerHere(Graded):
    """The second process has some rewards only."""

    __name__ = "fewer_here"

    def __call__(self, completions, **rest):
        found = super().__call__(completions, **rest)
        return [None if RANK and row % 3 == 0 else reward for row, reward in enumerate(found)]


TWO_ROLLOUTS = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1}
FEW = {"scoring": "packed", "tokens_per_pass": 14}
CASES = {
    "TRL's loss": (Stock, {"loss_type": "grpo"}, Fast, FEW, Graded),
    "TRL's loss, a dead rollout": (Stock, {"loss_type": "dapo", **TWO_ROLLOUTS}, Fast, FEW, LastOneTied),
    "TRL's loss, a penalty": (Stock, {"loss_type": "cispo", "beta": 0.5}, Fast, FEW, Graded),
    "ours, later steps": (Ours, {"num_iterations": 3}, Ours, FEW, Graded),
    "ours, a rollout without members": (Ours, TWO_ROLLOUTS, Ours, FEW, LastOneMissing),
    "ours, a process without members": (Ours, {"anchor": "fixed"}, Ours, FEW, NoneHere),
    "ours, an automatic tau, fewer members in a process": (Ours, {"tau": "auto"}, Ours, FEW, FewerHere),
    "ours, a target that looks at the anchor": (Ours, {"prior_in_target": True}, Ours, FEW, NoneHere),
}
CONFIGS = {Stock: GRPOConfig, Fast: FastGRPOConfig, Ours: ADPOConfig}


def trained(kind, folder, reward, options):
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **packs.ARGUMENTS, **options}
    trainer = kind(
        model=str(folder / "start"),
        reward_funcs=reward(),
        args=CONFIGS[kind](
            output_dir=str(folder / "out"), ddp_backend="gloo", model_init_kwargs={"dtype": "float32"}, **given
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS] * 4),
        processing_class=tiny_lm.tokenizer(),
    )
    trainer.train()
    return flat(trainer.model)


def flat(model):
    """All parameters, whole where they are sharded."""
    whole = (value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.parameters())
    return torch.cat([value.detach().reshape(-1).double() for value in whole])


def worker(folder):
    import torch.distributed as dist

    start = flat(tiny_lm.model())
    for name, (plain, options, kind, more, reward) in CASES.items():
        expected = trained(plain, folder, reward, options)
        found = trained(kind, folder, reward, {**options, **more})
        other = found.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, found), f"{name}: the processes have come apart"
        assert not torch.equal(found, start), f"{name}: nothing was learnt"
        off = float((found - expected).abs().max())
        assert off < 2e-6, f"{name}: off by {off}"
        print(f"alike: {name};", flush=True)  # noqa: T201
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in its own time


def test_two_processes(tmp_path):
    tiny_lm.model().save_pretrained(tmp_path / "start")
    done = two_processes.run(__file__, tmp_path)
    for name in CASES:
        assert done.stdout.count(f"alike: {name};") == 2, done.stderr[-3000:]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
