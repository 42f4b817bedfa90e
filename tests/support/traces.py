"""What a feature leaves behind while a trainer trains: else a run that ignores it would look the same."""

from contextlib import contextmanager

import torch
from torch._dynamo.utils import counters
from transformers import GenerationMixin, Trainer, TrainerCallback, modeling_utils
from transformers.generation import ContinuousMixin


class Traces(TrainerCallback):
    """Of the runs within ``recorded``, evaluations before and after them left out."""

    def __init__(self):
        self.trainers, self.rollouts, self.prompts, self.precisions, self.settings = [], [], [], set(), []
        self.training = False
        self.made_again = self.substeps = self.compiled = self.batched = 0

    def on_substep_end(self, *_, **__):
        self.substeps += 1

    @property
    def steps(self):
        return sum(trainer.state.global_step for trainer in self.trainers)

    def asked(self, name):
        """What every call of the sampler was given for it."""
        return {getattr(each, name) for each in self.settings}

    def layers(self):
        return {type(module).__name__ for trainer in self.trainers for module in trainer.model.modules()}


@contextmanager
def recorded(monkeypatch):
    torch.compiler.reset()  # what an earlier run compiled would be taken again
    found = Traces()
    with monkeypatch.context() as changes:
        _watch(found, changes)
        yield found


def _watch(found, changes):
    train, again, generate = Trainer.train, modeling_utils.checkpoint, GenerationMixin.generate
    batch = ContinuousMixin.generate_batch

    def trained(self, *arguments, **options):
        found.trainers.append(self)
        self.add_callback(found)
        if hasattr(self, "_generate_and_score_completions"):
            rollout, sample = self._generate_and_score_completions, self._generate_single_turn
            self._generate_and_score_completions = lambda rows: found.rollouts.append(len(rows)) or rollout(rows)
            self._generate_single_turn = lambda ids, *a, **b: found.prompts.extend(ids) or sample(ids, *a, **b)
        linear = [module for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        hooks = [] if self.args.torch_compile else [module.register_forward_hook(layer_done) for module in linear]
        before = counters["frames"]["ok"]
        found.training = True
        try:
            return train(self, *arguments, **options)
        finally:
            found.training = False
            found.compiled += counters["frames"]["ok"] - before
            for hook in hooks:
                hook.remove()

    def layer_done(module, _, output):
        if torch.is_grad_enabled():
            found.precisions.add((module.weight.dtype, output.dtype))

    def made_again(*arguments, **options):
        found.made_again += found.training
        return again(*arguments, **options)

    def generated(self, *arguments, **options):
        if found.training:
            found.settings.append(options["generation_config"])
        return generate(self, *arguments, **options)

    def batched(self, *arguments, **options):
        found.batched += found.training
        return batch(self, *arguments, **options)

    changes.setattr(Trainer, "train", trained)
    changes.setattr(modeling_utils, "checkpoint", made_again)
    changes.setattr(GenerationMixin, "generate", generated)
    changes.setattr(ContinuousMixin, "generate_batch", batched)


LEFT = {
    "gradient checkpointing": lambda found: found.made_again > 0,
    "torch.compile": lambda found: found.compiled > 0,
    "accumulation": lambda found: found.substeps == found.steps > 0,
    "bf16": lambda found: found.precisions == {(torch.float32, torch.bfloat16)},
    "bf16 weights": lambda found: found.precisions == {(torch.bfloat16, torch.bfloat16)},
    "qlora": lambda found: "Linear4bit" in found.layers(),
    "top_p": lambda found: found.asked("top_p") == {0.5},
    "top_k": lambda found: found.asked("top_k") == {3},
    "min_p": lambda found: found.asked("min_p") == {0.3},
    "repetition_penalty": lambda found: found.asked("repetition_penalty") == {1.3},
    "num_iterations": lambda found: (found.rollouts, found.steps) == ([8], 2),
    "steps_per_generation": lambda found: (found.rollouts, found.steps) == ([16], 2),
    "continuous batching": lambda found: found.batched == len(found.rollouts) > 0 == len(found.settings),
}
"""By feature, of runs of two steps of eight rows; what has none here is shown by something else."""
