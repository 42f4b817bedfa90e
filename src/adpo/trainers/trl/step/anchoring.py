"""The anchor of online training: which policy it is, and what it gives the members of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adpo.anchors import EMA, Refresh, Snapshot
from adpo.trainers.trl.step.rows import Rows

LogpOf = Callable[[Rows], Tensor]
"""Log-probabilities of rows under the policy as its weights are now, without gradient."""


class AnchorKeeper:
    """The policy that u is measured from.

    The on-policy anchor is the policy of the first step on a rollout: it keeps no weights, its log-probabilities
    are those of that step, kept beside the rollout (``anchor_logp``) for the later ones. Where parameters are
    ``sharded`` a pass is a matter of all processes: every row is then scored in each.
    """

    def __init__(self, args: Any, policy: nn.Module, logp_of: LogpOf, *, sharded: bool) -> None:
        self.kind, self._logp_of, self.sharded = args.anchor, logp_of, sharded
        self.one_step = one_step_per_rollout(args)
        self.policy = _anchor(args, policy)
        self.sampled_at = -1  # the optimizer step before which the latest rollout was sampled

    def coincides(self, step: int) -> bool:
        """Whether policy and anchor are known to be the same before this optimizer step."""
        if self.kind == "none":
            return False
        return step == self.sampled_at if self.policy is None else self.policy.coincides

    def logp(self, rows: Rows, places: Tensor) -> Tensor | None:
        """Of the members at ``places``, where the policy has left its anchor; None where there is no anchor."""
        if self.kind == "none":
            return None
        if self.policy is not None:
            return self.policy.logp(lambda _: self.current_logp(rows, places))
        return rows["anchor_logp"][places]

    def current_logp(self, rows: Rows, places: Tensor) -> Tensor:
        """Under the policy as it is now."""
        if self.sharded:
            return self._logp_of(rows)[places]
        return self._logp_of({name: values[places] for name, values in rows.items()})

    def remember(self, rollout: Sequence[Rows], window: range, logp: Tensor, step: int) -> None:
        """After the first step on a rollout: what later steps need and no pass has scored is scored now.

        ``window`` are the numbers of the micro-batches that made the step, ``logp``, ``[rows]`` of the step, is
        NaN for what no pass scored.
        """
        if self.kind != "on_policy" or step != self.sampled_at or self.one_step:
            return
        scored: Iterator[Tensor] = iter(torch.split(logp, [len(rollout[number]["member"]) for number in window]))
        for number, part in enumerate(rollout):
            of_part = next(scored) if number in window else torch.full_like(part["best"], torch.nan)
            if "anchor_logp" not in part:
                part["anchor_logp"] = self._completed(of_part.to(part["best"]), part)

    def state_dict(self) -> dict[str, Any]:
        """Without the weights."""
        return {"sampled_at": self.sampled_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampled_at = state["sampled_at"]

    def _completed(self, logp: Tensor, part: Rows) -> Tensor:
        """With the log-probabilities of members that are missing; zero for the others, which nothing looks at."""
        missing = (logp.isnan() & part["member"]).nonzero().squeeze(1)
        if self.sharded:
            missing = torch.arange(len(logp), device=logp.device)
        logp = logp.nan_to_num(0.0)
        if len(missing):
            logp[missing] = self._logp_of({name: values[missing] for name, values in part.items()})
        return logp


class KLBudget:
    """Training ends once the policy is further than this from where it started, in nats a completion."""

    def __init__(self, limit: float, start: Snapshot, logp_of: LogpOf, *, per_token: bool, reduce: Any) -> None:
        self.limit, self.start, self._logp_of, self._reduce = limit, start, logp_of, reduce
        self.per_token = per_token  # log-probabilities are means over tokens
        self.exceeded = False

    def measure(self, rows: Rows) -> float:
        """KL(policy || policy at the start) by the members of a rollout that the policy has just sampled."""
        distance = 0.0 if self.start.coincides else self._distance(rows)
        self.exceeded = distance > self.limit
        return distance

    def _distance(self, rows: Rows) -> float:
        moved = self._logp_of(rows) - self.start.logp(lambda _: self._logp_of(rows))
        if self.per_token:
            moved = moved * (rows["completion_mask"] * rows.get("tool_mask", 1)).sum(1)
        member = rows["member"]
        sums = torch.stack([moved[member].sum(), member.sum().to(moved)])
        total, count = self._reduce(sums, reduction="sum").tolist()
        return float(total / max(1.0, count))

    def state_dict(self) -> dict[str, Any]:
        return {"over_budget": self.exceeded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.exceeded = state["over_budget"]


def kl_budget_of(
    args: Any, policy: nn.Module, anchor: Snapshot | None, logp_of: LogpOf, reduce: Any
) -> KLBudget | None:
    """A fixed anchor is the policy at the start."""
    if args.kl_budget is None:
        return None
    start = anchor if args.anchor == "fixed" and anchor is not None else Snapshot(policy)
    return KLBudget(args.kl_budget, start, logp_of, per_token=args.logp_reduction == "mean", reduce=reduce)


def refuse_shards(args: Any) -> None:
    """For a trainer whose parameters are sharded."""
    if args.anchor not in ("on_policy", "none") or args.kl_budget:
        raise ValueError(
            "anchors that keep a copy of the weights, and kl_budget, do not work on sharded parameters (FSDP, "
            "DeepSpeed): use the on_policy anchor"
        )


def one_step_per_rollout(args: Any) -> bool:
    return bool(args.num_iterations == 1 and args.steps_per_generation <= args.gradient_accumulation_steps)


def _anchor(args: Any, policy: nn.Module) -> Snapshot | None:
    """None also for the on-policy anchor."""
    if args.anchor == "fixed":
        return Snapshot(policy)
    if args.anchor == "ema":
        return EMA(policy, args.anchor_decay)
    if args.anchor == "refresh":
        return Refresh(policy, args.anchor_every)
    return None
