"""`ADPOTrainer`: TRL's `GRPOTrainer` with the objective of the core, exact under any split of a group.

TRL samples the completions, scores them with the reward functions, shuffles the rows and cuts them into
micro-batches; a group may be spread over all of them, and over ranks. Before the first micro-batch of an optimizer
step this trainer looks at the step's rows together, computes ``c = dloss/dlogp`` of every row, and lets each
micro-batch back-propagate ``sum c * logp``. Rows whose c is zero are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from adpo import exact
from adpo.anchors import EMA, Anchor, Refresh, Self
from adpo.integrations.trl.config import ADPOConfig

Rows = dict[str, Tensor]
"""Columns of a batch, one row per completion."""

ROW_COLUMNS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "rewards", "groups", "member")
OPTIONAL_COLUMNS = ("old_per_token_logps", "tool_mask")


class ADPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """Train a causal language model on rewards with any objective of the core; see `ADPOConfig`."""

    _tag_names = ("trl", "adpo")
    _name = "ADPO"
    _buffered_inputs: list[Rows] | None  # the rollout at hand, in micro-batches

    def __init__(self, model: Any, reward_funcs: Any = None, args: ADPOConfig | None = None, **rest: Any) -> None:
        if args is None:
            args = ADPOConfig("adpo-output")
        if not isinstance(args, ADPOConfig):
            raise TypeError(f"args must be an ADPOConfig; got {type(args).__name__}")
        super().__init__(model, reward_funcs, args, **rest)
        self.objective = args.objective()
        self.schedule = args.temperature_schedule()
        self.tau: float = args.tau
        self.anchor = self._made_anchor(args)
        self.add_callback(_AfterStep(self))
        self._rewards = torch.zeros(0)  # of the latest rollout, of all ranks
        self._sampled_at = -1  # the optimizer step before which the latest rollout was made
        self._planned: list[Rows] = []  # micro-batches of the optimizer step at hand
        self._check_layout()

    def _made_anchor(self, args: ADPOConfig) -> Anchor | None:
        """None is the on-policy anchor: its log-probabilities are taken when the completions are sampled."""
        policy: nn.Module = self.accelerator.unwrap_model(self.model)
        if args.anchor == "fixed":
            return Self(policy)
        if args.anchor == "ema":
            return EMA(policy, args.anchor_decay)
        if args.anchor == "refresh":
            return Refresh(policy, args.anchor_every)
        return None

    def _check_layout(self) -> None:
        """A group must not straddle two optimizer steps."""
        args = self.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if args.steps_per_generation > args.gradient_accumulation_steps and per_step % self.num_generations:
            raise ValueError(
                f"groups of num_generations = {self.num_generations} would straddle optimizer steps of "
                f"{per_step} rows a process: make per_device_train_batch_size * gradient_accumulation_steps "
                "a multiple of num_generations, or sample once per step"
            )

    # What TRL samples and scores, with what the objective needs beside it.

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        per_function: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        weights = self.reward_weights.to(per_function.device)
        rewards = (per_function * weights).nansum(1)
        self._rewards = torch.where(per_function.isnan().all(1), torch.nan, rewards)
        if self.model.training:
            self._move_tau(completions)
        return per_function

    def _move_tau(self, completions: Sequence[Any]) -> None:
        answers = gather_object([_text(completion) for completion in completions])
        entropy = _answer_entropy(answers, self.num_generations)
        known = self._rewards[torch.isfinite(self._rewards)]
        if len(known):
            self.tau = float(self.schedule.update(entropy=entropy, reward=float(known.mean())))
        self._note(answer_entropy=entropy, tau=self.tau)

    def _generate_and_score_completions(self, inputs: Any) -> Rows:
        batch: Rows = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        if "pixel_values" in batch:
            raise ValueError("ADPOTrainer trains on text; this data set has images")
        rows = len(batch["completion_ids"])
        first = self.accelerator.process_index * rows
        rewards = self._rewards[first : first + rows].to(self.accelerator.device)
        lengths = batch["completion_mask"].sum(1)
        member = torch.isfinite(rewards) & (lengths > 0)
        truncated = self._truncated(batch["completion_ids"], lengths)
        if self.args.truncated == "zero":
            rewards = torch.where(truncated, 0.0, rewards)
        elif self.args.truncated == "mask":
            member &= ~truncated
        batch["rewards"], batch["member"] = rewards, member
        batch["groups"] = torch.arange(first, first + rows, device=rewards.device) // self.num_generations
        self._sampled_at = self.state.global_step
        return batch

    def _truncated(self, completion_ids: Tensor, lengths: Tensor) -> Tensor:
        """Completions that the length limit cut: their last token ends nothing."""
        last = completion_ids.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1))
        ends = torch.tensor([*self.eos_token_ids, self._tokenizer.pad_token_id], device=last.device)
        return (lengths > 0) & ~torch.isin(last, ends).squeeze(1)

    def _prepare_inputs(self, generation_batch: Any) -> Rows:
        """As TRL: sample when due, cut into micro-batches; and plan each optimizer step before its first one."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        per_rollout = self.args.steps_per_generation
        if self._step % (per_rollout * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            batch = {
                name: batch[name] for name in (*ROW_COLUMNS, *OPTIONAL_COLUMNS) if batch.get(name) is not None
            }
            if per_rollout <= self.current_gradient_accumulation_steps:
                batch = shuffle_sequence_dict(batch)  # a step sees the whole rollout: rows may go anywhere
            self._buffered_inputs = split_tensor_dict(batch, per_rollout)
        if not self._planned:
            start = self._step % per_rollout
            window = self._buffered_inputs[start : start + self.current_gradient_accumulation_steps]
            self._planned = self._plan(window, len(window) / self.current_gradient_accumulation_steps)
        return self._planned.pop(0)

    # The optimizer step as one batch.

    def _plan(self, window: Sequence[Rows], share: float) -> list[Rows]:
        """The window's micro-batches with their coefficients, dead rows left out; ``share`` of a whole step."""
        rows = {name: torch.cat([part[name] for part in window]) for name in window[0]}
        member = rows["member"]
        counted = int(self.accelerator.reduce(member.sum(), reduction="sum"))
        c = torch.zeros(len(member), dtype=torch.float64, device=member.device)
        loss = 0.0
        if counted:
            logp, anchor_logp = self._both_logp(rows)
            found = exact.coefficients(
                self.objective,
                logp[member],
                rows["groups"][member],
                anchor_logp[member],
                tau=self.tau,
                rewards=rows["rewards"][member],
            )
            c[member] = found.coefficients * share
            loss = float(found.loss) * share
            self._note(**{name: float(value) for name, value in found.diagnostics._asdict().items()})
        live = c.nonzero().squeeze(1)
        self._note(rows_left_out=1 - len(live) / len(c), loss_of_groups=loss / share)
        rows["c"] = c
        planned = []
        for part in torch.tensor_split(live, len(window)):
            # Several processes average their gradients in every backward pass: none may sit out.
            kept = part if len(part) or self.accelerator.num_processes == 1 else live.new_zeros(1)
            chosen = _trimmed({name: values[kept] for name, values in rows.items()})
            chosen["loss"] = torch.full((), loss / len(window), device=c.device)
            planned.append(chosen)
        return planned

    def _both_logp(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Log-probabilities under policy and anchor, ``[rows]``; both zero where they are known to be equal."""
        first_step = self.state.global_step == self._sampled_at
        if first_step if self.anchor is None else self.anchor.coincides:
            zero = torch.zeros(len(rows["member"]), device=rows["member"].device)
            return zero, zero
        logp = self._scored(self.model, rows)
        if self.anchor is not None:
            anchor_logp = self.anchor.logp(lambda _: self._scored(self.model, rows))
            assert anchor_logp is not None
            return logp, anchor_logp
        return logp, self._summed(rows["old_per_token_logps"], rows)

    @torch.no_grad()
    def _scored(self, model: nn.Module, rows: Rows) -> Tensor:
        size = self.args.per_device_train_batch_size
        return torch.cat([self._logp(model, part) for part in _split(rows, size)])

    def _logp(self, model: nn.Module, rows: Rows) -> Tensor:
        """Log-probability of each completion, differentiable."""
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        tokens = self._get_per_token_logps_and_entropies(model, ids, mask, rows["completion_ids"].size(1))[0]
        return self._summed(tokens, rows)

    def _summed(self, per_token: Tensor, rows: Rows) -> Tensor:
        mask = rows["completion_mask"]
        if "tool_mask" in rows:
            mask = mask * rows["tool_mask"]
        total = torch.where(mask.bool(), per_token.to(torch.float64), 0.0).sum(1)
        return total / mask.sum(1).clamp(min=1) if self.args.logp_reduction == "mean" else total

    def _compute_loss(self, model: nn.Module, inputs: Rows) -> Tensor:
        """The gradient of the whole-group loss, and for the log its value."""
        if "c" not in inputs:  # evaluation: rewards are what counts
            return torch.zeros((), device=self.accelerator.device)
        if not len(inputs["c"]):
            return inputs["loss"].clone().requires_grad_()
        weighted: Tensor = (inputs["c"] * self._logp(model, inputs)).sum() * self.accelerator.num_processes
        return weighted - weighted.detach() + inputs["loss"]

    def _note(self, **values: float) -> None:
        for name, value in values.items():
            self._metrics["train"][f"adpo/{name}"].append(value)


class _AfterStep(TrainerCallback):  # type: ignore[misc]
    """Tells the anchor that the optimizer has stepped."""

    def __init__(self, trainer: ADPOTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.trainer.anchor is not None:
            self.trainer.anchor.on_step()


def _split(rows: Rows, size: int) -> list[Rows]:
    count = len(rows["member"])
    return [
        _trimmed({name: values[start : start + size] for name, values in rows.items()})
        for start in range(0, count, size)
    ]


def _trimmed(rows: Rows) -> Rows:
    """Without the columns that are padding in every one of these rows."""
    if not len(rows["member"]):
        return rows
    prompt = int(rows["prompt_mask"].any(0).long().argmax())  # padded on the left
    length = max(1, int(rows["completion_mask"].sum(1).max()))  # padded on the right
    cut: dict[str, Callable[[Tensor], Tensor]] = {
        "prompt": lambda values: values[:, prompt:],
        "completion": lambda values: values[:, :length],
    }
    sides = {"prompt_ids": "prompt", "prompt_mask": "prompt", "completion_ids": "completion"}
    sides |= dict.fromkeys(("completion_mask", *OPTIONAL_COLUMNS), "completion")
    return {name: cut[sides[name]](values) if name in sides else values for name, values in rows.items()}


def _text(completion: Any) -> str:
    """The text of a completion, which TRL hands over as a string or as messages."""
    if isinstance(completion, str):
        return completion.strip()
    return str(completion[-1].get("content", "")).strip() if completion else ""


def _answer_entropy(answers: Sequence[str], size: int) -> float:
    """Entropy of the answers inside a group over log(group size), mean over groups; 0 where all agree."""
    if size < 2:
        return 0.0
    total, groups = 0.0, len(answers) // size
    for start in range(0, groups * size, size):
        counts = Counter(answers[start : start + size]).values()
        total -= sum(n / size * math.log(n / size) for n in counts)
    return min(1.0, max(0.0, total / groups / math.log(size)))
