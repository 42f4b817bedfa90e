"""`ListwiseTrainer`: a language model and lists of completions with rewards, by any objective of the core.

A row of the data is a list: a prompt and K completions. The loss of a list needs the log-probabilities of all of
them, the memory at hand may hold fewer: `adpo.exact` makes the gradient the same either way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from adpo.anchors import EMA, Refresh, Snapshot
from adpo.scoring.context import longest_row
from adpo.scoring.dropout import without_dropout
from adpo.scoring.sequences import Sequences
from adpo.trainers.checkpoints.state_file import StateFile
from adpo.trainers.checks.accepted import (
    limit_rows,
    refuse_liger,
    refuse_pictures,
    refuse_router_loss,
    refuse_vision,
)
from adpo.trainers.checks.policies import refuse_frozen, refuse_kind, refuse_tokenizer
from adpo.trainers.epochs import EpochShuffle, StartEpoch
from adpo.trainers.group_step import ByIndex, GroupStep, StepRows, one_thread
from adpo.trainers.listwise import sources
from adpo.trainers.listwise.collate import Batch, Collate, shares, tokens
from adpo.trainers.listwise.config import ListwiseConfig
from adpo.trainers.listwise.watching import Watching
from adpo.trainers.monitors.empty_steps import EmptySteps
from adpo.trainers.monitors.guards import RefuseBadSteps

FAR = 2**32  # keeps the lists of different processes apart


class ListwiseTrainer(Watching):
    """Train a causal language model on lists; see `ListwiseConfig`.

    ``train_dataset`` and ``eval_dataset`` are a `PreferenceTable`, rows in the form that makes (a
    `datasets.Dataset` with ``prompt``, ``completions`` and ``rewards`` or ``ranks``, or ``chosen`` and
    ``rejected``), or a file of them. ``reference`` is a model, or the name of one, in place of the policy at the
    start.
    """

    _name = "ADPO on lists"
    train_sampler: Any = None

    def __init__(
        self,
        model: Any,
        args: ListwiseConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        reference: nn.Module | str | Path | None = None,
        peft_config: Any = None,
        **rest: Any,
    ) -> None:
        args = args or ListwiseConfig("listwise-output")
        if not isinstance(args, ListwiseConfig):
            raise TypeError(f"args must be a ListwiseConfig; got {type(args).__name__}")
        refuse_liger(args)
        model, processing_class = sources.model_and_tokenizer(model, processing_class, peft_config)
        refuse_kind("ListwiseTrainer", model)
        if args.disable_dropout:
            without_dropout(model)
        refuse_pictures("ListwiseTrainer", (train_dataset, eval_dataset), processing_class)
        refuse_vision("ListwiseTrainer", model)
        refuse_tokenizer("ListwiseTrainer", model, processing_class)
        refuse_router_loss("ListwiseTrainer", model)
        limit_rows(model)
        context = longest_row(model.config)
        tables = [sources.table(data, processing_class, args, context) for data in (train_dataset, eval_dataset)]
        pad = processing_class.pad_token_id
        super().__init__(
            model,
            args,
            data_collator=Collate(processing_class.eos_token_id if pad is None else pad),
            train_dataset=tables[0],
            eval_dataset=tables[1],
            processing_class=processing_class,
            reference=reference,
            **rest,
        )
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if sharded and args.anchor in ("ema", "refresh"):
            raise ValueError(
                f"the {args.anchor} anchor keeps a copy of the weights, which sharded ones do not allow: use fixed"
            )
        self.objective = args.objective()
        self.schedule = args.temperature_schedule()
        self.tau: float = args.tau
        self.anchor = self._made_anchor(args)
        self.step_guard = RefuseBadSteps(self, args.max_refused_steps)
        self.empty_steps = EmptySteps(self)
        self.group_step = GroupStep(
            self.objective,
            self.scorer,
            self.accelerator,
            self.empty_steps,
            nll_weight=args.nll_weight,
            checkpoint=args.gradient_checkpointing,
        )
        policies = {} if self.anchor is None else {"anchor": self.anchor}
        self.checkpoint_parts.append(StateFile(policies, self, guard=self.step_guard))
        for callback in (self.empty_steps, self.step_guard, StartEpoch(self), _AfterStep(self)):
            self.add_callback(callback)

    def _made_anchor(self, args: ListwiseConfig) -> Snapshot | None:
        """None for scores that are looked up, and for no anchor at all."""
        policy: nn.Module = self.accelerator.unwrap_model(self.model)
        if args.anchor == "ema":
            return EMA(policy, args.anchor_decay)
        return Refresh(policy, args.anchor_every) if args.anchor == "refresh" else None

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As in transformers; the reference is scored first, a run of refused steps is an error."""
        refuse_frozen(self.model)
        self.score_reference()
        result = super().train(*arguments, **options)
        self.step_guard.complain()
        return result

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        rows = self.train_dataset if dataset is None else dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.train_sampler = EpochShuffle(rows, seed)
        return self.train_sampler

    # The step.

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Tensor:
        """Lists in an optimizer step, of all processes."""
        count = torch.tensor(sum(int(batch["lists"].max()) + 1 for batch in batch_samples), device=device)
        total: Tensor = self.accelerator.reduce(count, reduction="sum") if self.args.world_size > 1 else count
        return total

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward passes of one batch of lists."""
        model.train()
        batch = self._prepare_inputs(inputs)
        several = self.accelerator.num_processes > 1
        lists = torch.tensor(int(batch["lists"].max()) + 1, device=self.accelerator.device)
        here = float(self.accelerator.reduce(lists, reduction="sum")) if several else float(lists)
        share = here / float(here if num_items_in_batch is None else num_items_in_batch)
        best, worst = shares(batch["lists"], batch["rewards"])
        at_anchor = self.anchor is not None and self.anchor.coincides and not self.objective.target.reads_anchor
        passes = self.group_step.passes(model)
        passes.by_tokens &= self.args.completions_per_pass is None
        first = torch.zeros_like(lists).view(1)
        rows = StepRows(
            batch["lists"] + FAR * self.accelerator.process_index,
            batch["rewards"],
            best,
            here,
            self._rows(model, tokens(batch), batch["lists"]),
            lambda: self._parts(batch, self.args.completions_per_pass),
            lambda: 0 * self._logp(model, tokens(batch).take(first)).sum(),
        )
        with self.compute_loss_context_manager(), one_thread(self.scorer.device):
            anchor_logp = None if at_anchor else self._anchor_logp(batch)
            found = self.group_step.accumulate(
                passes, rows, anchor_logp, tau=self.tau, at_anchor=at_anchor, share=share
            )
        loss = found.loss.to(torch.float32) * share
        if passes.engine is not None and self.accelerator.sync_gradients:
            passes.engine.step()
        self.empty_steps.after_passes()
        # A policy at its anchor has log-ratio zero, whatever its log-probabilities are.
        self._observe(batch, found, found.logp if at_anchor else anchor_logp, best, worst)
        return loss

    def _rows(self, model: nn.Module, rows: Sequences, lists: Tensor) -> ByIndex:
        if not self.scorer.packs:
            return ByIndex(
                lambda chosen: self._logp(model, rows.pick(chosen)),
                None,
                lambda chosen: rows.pick(chosen).input_ids.numel(),
            )
        here = Sequences(*(part.cpu() for part in rows))  # put together on the CPU, while the device is at work
        return ByIndex(
            lambda chosen: self._logp(model, here.pick(chosen.cpu())),
            lambda chosen, c: self.scorer.weighted(model, here.pick(chosen.cpu()), c),
            self.scorer.sizes(here, lists).tokens,
        )

    # What a checkpoint keeps.

    def state_dict(self) -> dict[str, Any]:
        """Temperature, and what a run has to have in common with the checkpoint it goes on from."""
        return {
            "tau": self.tau,
            "schedule": self.schedule.state_dict(),
            "reference": self._reference_key,
            "data": self.train_dataset.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] != self.train_dataset.fingerprint:
            raise ValueError("trained on other data, or the data has changed: not resumed")
        if state["reference"] != self._reference_key:
            raise ValueError("trained against another reference: resume it with the one it had")
        self.tau = state["tau"]
        self.schedule.load_state_dict(state["schedule"])


class _AfterStep(TrainerCallback):  # type: ignore[misc]
    """What follows an optimizer step."""

    def __init__(self, trainer: ListwiseTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.trainer.anchor is not None:
            self.trainer.anchor.on_step()
        self.trainer._move_tau()
