"""Log-probabilities of lists under policy, anchor and reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from adpo.anchors import Snapshot
from adpo.preferences.table import PreferenceTable
from adpo.scoring.passes import whole_groups
from adpo.scoring.sequences import Sequences
from adpo.trainers.checkpoints.safe_checkpoints import SafeCheckpoints
from adpo.trainers.forms import scorer_of
from adpo.trainers.listwise import sources
from adpo.trainers.listwise.collate import Batch, tokens
from adpo.trainers.listwise.reference import Scores, fingerprint
from adpo.trainers.sharding import is_sharded, then_sharded

SCORED_AT_ONCE = 32  # completions, where nothing else is said


class Scoring(SafeCheckpoints, Trainer):  # type: ignore[misc]
    """A trainer of transformers that scores lists, and knows what the reference gives them."""

    reference: nn.Module | str | Path | None
    anchor: Snapshot | None

    def __init__(self, *arguments: Any, reference: nn.Module | str | Path | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.reference = reference
        self._scores: dict[str, Tensor] = {}  # of the reference, by the fingerprint of the table
        self._starts: dict[str, Tensor] = {}  # where the completions of each list begin
        self._reference_key: str | None = None
        self.scorer = scorer_of(self, self.args.logp_reduction)

    def _logp(self, model: nn.Module, rows: Sequences, reduction: Any = None) -> Tensor:
        """``[rows]``, differentiable."""
        return self.scorer.logp(model, rows, reduction)

    @torch.no_grad()
    def _scored(self, model: nn.Module, batch: Batch, reduction: Any = None) -> Tensor:
        """``[rows]``, in passes of the size that training uses."""
        everything = tokens(batch)
        parts = self._parts(batch, self.args.completions_per_pass or SCORED_AT_ONCE)
        if is_sharded(model):  # as many passes in every process
            count = torch.tensor([len(parts)], device=self.accelerator.device)
            parts += parts[-1:] * (int(self.accelerator.gather(count).max()) - len(parts))
        found = torch.empty(len(batch["rewards"]), dtype=torch.float64, device=batch["rewards"].device)
        with self.accelerator.autocast(), then_sharded(model):
            for part in parts:
                found[part] = self._logp(model, everything.pick(part), reduction).double()
        return found

    def _parts(self, batch: Batch, most: int | None) -> list[Tensor]:
        """Rows that go through the model together: so many tokens, or at most so many completions."""
        if self.scorer.packs and self.args.completions_per_pass is None:
            return self.scorer.passes(tokens(batch), batch["lists"])
        return whole_groups(batch["lists"], most)

    def _anchor_logp(self, batch: Batch) -> Tensor | None:
        """Of training lists."""
        if self.anchor is not None:
            return self.anchor.logp(lambda _: self._scored(self.model, batch))
        return self._reference_logp(batch, self.train_dataset)

    def _reference_logp(self, batch: Batch, table: PreferenceTable) -> Tensor | None:
        if self.args.anchor == "none":
            return None
        place = self._starts_of(table)[batch["index"].cpu()] + batch["place"].cpu()
        logp = self._scores[table.fingerprint][place].to(batch["rewards"].device)
        if self.args.logp_reduction == "mean":
            logp = logp / batch["completion_mask"][:, 1:].sum(1).clamp(min=1)
        return logp

    def score_reference(
        self, tables: Sequence[PreferenceTable] | None = None, on_progress: Callable[[], None] = lambda: None
    ) -> int:
        """Look the reference's log-probabilities up, or compute and keep them; the number of lists scored.

        Of the data at hand, or of these tables; ``on_progress`` is called for every list scored. The policy at the
        start is the reference where none was given: later it cannot be scored any more.
        """
        scored = 0
        for table in self._tables_at_hand() if tables is None else tables:
            if self.args.anchor == "none" or table.fingerprint in self._scores:
                continue
            kept = self._kept_scores(table)
            found = kept.read(table.completions)
            if found is None:
                if self.reference is None and self.state.global_step:
                    raise ValueError("the policy has moved: score the reference of all data before training")
                found = self._score_table(table, on_progress)
                scored += len(table)
                if self.accelerator.is_main_process:
                    kept.write(found)
            self._scores[table.fingerprint] = found
        return scored

    def _tables_at_hand(self) -> list[PreferenceTable]:
        """Those whose lists are looked up: not the training lists of an anchor that moves."""
        found = [self.train_dataset] if self.args.anchor == "fixed" else []
        return [table for table in (*found, self.eval_dataset) if table is not None]

    def _kept_scores(self, table: PreferenceTable) -> Scores:
        if self._reference_key is None:
            policy = self.accelerator.unwrap_model(self.model)
            self._reference_key = fingerprint(policy if self.reference is None else self.reference)
        precision = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "as it is"
        form = "packed" if self.scorer.packs else "padded"
        return Scores(sources.cache(self.args), self._reference_key, table.fingerprint, precision, form)

    def _score_table(self, table: PreferenceTable, on_progress: Callable[[], None]) -> Tensor:
        """Summed log-probabilities of all completions of a table, in its order."""
        if isinstance(self.reference, str | Path):
            self.reference = sources.load_model(self.reference)
        model: Any = self.model if self.reference is None else self.reference
        model.to(self.accelerator.device)
        if self.reference is not None:
            self.scorer.accept(model)
        was_training = model.training
        model.eval()
        found = torch.zeros(table.completions, dtype=torch.float64)
        starts = self._starts_of(table)
        for numbers, batch in self._few_at_a_time(table):
            place = starts[batch["index"].cpu()] + batch["place"].cpu()
            found[place] = self._scored(model, batch, "sum").cpu()
            for _ in numbers:
                on_progress()
        model.train(was_training)
        if self.accelerator.num_processes > 1:
            found = self.accelerator.reduce(found.to(self.accelerator.device), reduction="sum").cpu()
        return found

    def _few_at_a_time(self, table: PreferenceTable, together: bool = False) -> Iterator[tuple[list[int], Batch]]:
        """This process's lists that go through the model at once without gradient, and their places in the table.

        ``together``, where parameters are sharded: as often in every process, with lists that were there before.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        sizes, most = table.sizes, self.args.completions_per_pass or SCORED_AT_ONCE
        shares = [few_at_a_time(sizes, range(first, len(table), world), most) for first in range(world)]
        longest = max(map(len, shares)) if together else 0
        mine = shares[rank]
        for places in mine + (mine[-1:] or [[0]]) * (longest - len(mine)):
            yield places, self._prepare_inputs(self.data_collator([table[place] for place in places]))

    def _starts_of(self, table: PreferenceTable) -> Tensor:
        if table.fingerprint not in self._starts:
            starts = list(accumulate(table.sizes, initial=0))[:-1]
            self._starts[table.fingerprint] = torch.tensor(starts, dtype=torch.long)
        return self._starts[table.fingerprint]


def few_at_a_time(sizes: Sequence[int], places: Iterable[int], most: int) -> list[list[int]]:
    """Lists of these sizes, as many at a time as have at most so many completions.

    >>> few_at_a_time([2, 3, 4, 9, 1], [0, 1, 2, 3, 4], 5)
    [[0, 1], [2], [3], [4]]
    """
    found: list[list[int]] = []
    room = 0
    for place in places:
        if not found or sizes[place] > room:
            found.append([])
            room = most
        found[-1].append(place)
        room -= sizes[place]
    return found
