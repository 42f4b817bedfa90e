"""What a `ListwiseTrainer` sees on the way, and what follows from it: metrics, temperature, evaluation."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor

from adpo.core.temperature import Temperature
from adpo.exact import GroupGradient
from adpo.preferences.rankings import Ranking, ranking
from adpo.preferences.table import PreferenceTable
from adpo.trainers.listwise.collate import Batch
from adpo.trainers.listwise.scores import Scoring
from adpo.trainers.monitors.auto_tau import CALIBRATION_ROLLOUTS, NEAR_PEAK, AutoTau, rate_of
from adpo.trainers.monitors.gradient_monitor import GradientMonitor
from adpo.trainers.monitors.weights_moved import WeightsMoved
from adpo.trainers.sharding import is_sharded

Score = Literal["log_ratio", "mean_logp"]


class Watching(Scoring):
    """Notes figures batch by batch, moves tau step by step, ranks held-out lists."""

    schedule: Temperature
    tau: float
    control: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._metrics: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list)}
        self._calibrating: list[tuple[Batch, Tensor]] = []  # batches of the step, and their logp before it
        self._rate = 1.0  # of that step, as a share of the highest
        self._heard: defaultdict[str, float] = defaultdict(float)  # sums over the step, for the temperature
        self._with_gradient: list[float] = []  # shares of lists, batch by batch of a step
        self.gradient_monitor = GradientMonitor()
        self.weights_moved = WeightsMoved(self, self.gradient_monitor)
        self.add_callback(self.weights_moved)

    def _observe(
        self, batch: Batch, found: GroupGradient, anchor_logp: Tensor | None, best: Tensor, worst: Tensor
    ) -> None:
        """After the passes of a batch; ``anchor_logp`` is None where there is no anchor."""
        self._note(**{name: float(value) for name, value in found.diagnostics._asdict().items()}, tau=self.tau)
        self._with_gradient.append(float(found.diagnostics.live))
        if not self._with_gradient[-1]:
            self.gradient_monitor.rollout({"tied": len(torch.unique(batch["lists"]))})
        logp = found.logp
        seen = torch.isfinite(logp)  # rows without gradient at the anchor: nobody asked for their scores
        scores = logp if anchor_logp is None else logp - anchor_logp
        ranked = ranking(scores[seen], batch["rewards"][seen], batch["lists"][seen])
        best, worst = best * seen, worst * seen
        sums = {name: values.sum() for name, values in ranked._asdict().items()}
        sums |= {"ranked": len(ranked.accuracy), "trained": found.rows_trained, "rows": len(logp)}
        sums |= {"best": best.sum(), "best_logp": (best * logp.nan_to_num()).sum()}
        sums |= {"worst": worst.sum(), "worst_logp": (worst * logp.nan_to_num()).sum()}
        sizes = torch.bincount(batch["lists"]).double()
        sums |= {"lists": len(sizes), "log_size": sizes.log().sum()}
        self._note_sums(self._of_all(sums), float(found.diagnostics.policy_entropy))
        if isinstance(self.schedule, AutoTau) and self.schedule.measured < CALIBRATION_ROLLOUTS:
            self._rate = rate_of(self.optimizer)
            if self._rate >= NEAR_PEAK:
                known = bool(seen.all()) and not is_sharded(self.model)  # then a pass is a matter of all processes
                self._calibrating.append((batch, logp if known else self._scored(self.model, batch)))

    def _note_sums(self, total: dict[str, float], entropy: float) -> None:
        if total["ranked"]:
            means = {name: total[name] / total["ranked"] for name in Ranking._fields}
            self._note(**means)
        for name, value in {**total, "entropy": entropy * total["lists"]}.items():
            self._heard[name] += value
        if total["best"] and total["worst"]:
            high, low = total["best_logp"] / total["best"], total["worst_logp"] / total["worst"]
            self._note(best_logp=high, worst_logp=low, logp_margin=high - low)
        self._note(rows_left_out=1 - total["trained"] / total["rows"])

    def _of_all(self, values: dict[str, Any]) -> dict[str, float]:
        """Sums over the processes."""
        table = torch.tensor([float(value) for value in values.values()], dtype=torch.float64)
        if self.accelerator.num_processes > 1:
            table = self.accelerator.reduce(table.to(self.accelerator.device), reduction="sum")
        return dict(zip(values, table.tolist(), strict=True))

    def _move_tau(self) -> None:
        """After an optimizer step."""
        if self._with_gradient:
            self.gradient_monitor.step(1 - sum(self._with_gradient) / len(self._with_gradient))
            self._with_gradient = []
        if self._calibrating and isinstance(self.schedule, AutoTau):
            rows = gather_object([row for number in range(len(self._calibrating)) for row in self._moved(number)])
            names, moved, before = zip(*rows, strict=True)
            numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
            lists = torch.tensor([numbers[name] for name in names])
            if self.schedule.measure(torch.tensor(moved), lists, torch.tensor(before), self._rate):
                self._note(u_spread=self.schedule.spread)
        self._calibrating = []
        if self._heard["ranked"]:
            entropy = self._heard["entropy"] / max(self._heard["log_size"], 1e-9)  # of the most there could be
            accuracy = self._heard["accuracy"] / self._heard["ranked"]
            self.tau = float(self.schedule.update(entropy=min(1.0, max(0.0, entropy)), reward=accuracy))
        self._heard.clear()

    def _moved(self, number: int) -> list[tuple[tuple[int, ...], float, float]]:
        """How far the step moved each row of one of its batches, under a name for its list, and from where."""
        batch, before = self._calibrating[number]
        moved = self._scored(self.model, batch) - before
        names = [(self.accelerator.process_index, number, place) for place in batch["lists"].tolist()]
        return list(zip(names, moved.tolist(), before.tolist(), strict=True))

    def _note(self, **values: float) -> None:
        for name, value in values.items():
            self._metrics["train"][f"adpo/{name}"].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        noted = self._metrics["train"]
        means = {name: sum(values) / len(values) for name, values in noted.items() if values}
        noted.clear()
        super().log({**logs, **means}, start_time)

    # Held-out lists.

    def rank(self, table: PreferenceTable, model: Any = None, by: Score = "log_ratio") -> Ranking:
        """How a model (the policy) orders the lists that have something to say.

        By log-ratio to the reference (whatever anchor training has; with none, by its log-probability), or by the
        mean log-probability of a token.
        """
        if by == "log_ratio":
            self.score_reference([table])
        model = self.model if model is None else model
        self.scorer.accept(self.accelerator.unwrap_model(model))
        parts, was_training = [], model.training
        model.eval()
        for numbers, batch in self._few_at_a_time(table, is_sharded(model)):
            scores = self._scored(model, batch, None if by == "log_ratio" else "mean")
            reference = self._reference_logp(batch, table) if by == "log_ratio" else None
            scores = scores if reference is None else scores - reference
            for place, number in enumerate(numbers):
                rows = batch["lists"] == place
                ranked = ranking(scores[rows], batch["rewards"][rows], batch["lists"][rows])
                parts.append((number, [values.tolist() for values in ranked]))
        model.train(was_training)
        columns = zip(*(values for _, values in sorted(dict(gather_object(parts)).items())), strict=True)
        return Ranking(*(torch.tensor([x for part in column for x in part]) for column in columns))

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Accuracy, NDCG and best-first of the held-out lists."""
        del ignore_keys
        table = self.eval_dataset if eval_dataset is None else eval_dataset
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.rank(table).mean().items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
