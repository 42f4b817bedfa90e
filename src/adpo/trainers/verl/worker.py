"""An actor of verl's that knows the coefficients of its rows before each optimizer step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from adpo import exact
from adpo.system.ranks import Ranks
from adpo.trainers.sharding import then_sharded
from adpo.trainers.verl import rows
from adpo.trainers.verl.loss import WEIGHT, weighted_logp
from adpo.trainers.verl.models import prepare
from adpo.trainers.verl.resume import load_schedule, save_schedule
from adpo.trainers.verl.settings import CURRENT, TRAINER, ADPOPolicyLoss

KEYS = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_fused_kernels")


class ADPOTrainingWorker(TrainingWorker):  # type: ignore[misc]
    """verl's worker; what is not ADPO's goes through untouched."""

    settings: ADPOPolicyLoss | None = None

    def set_loss_fn(self, loss_fn: Any) -> None:
        config = getattr(loss_fn, "keywords", {}).get("config")
        settings = getattr(config, "policy_loss", None)
        if isinstance(settings, ADPOPolicyLoss):
            self.settings, self.objective = settings, settings.objective()
            self.schedule = settings.temperature_schedule()
            loss_fn = partial(weighted_logp, reduction=settings.logp_reduction)
            prepare(self.engine)
        super().set_loss_fn(loss_fn)

    def train_mini_batch(self, data: TensorDict) -> Any:
        """All steps on a rollout."""
        if self.settings is not None:
            if not tu.pop(data, CURRENT, default=False):
                raise ValueError(f"set trainer.v1.trainer_mode={TRAINER}: other trainers of verl's are not ADPO's")
            self._steps = 0  # on this rollout; at the first one it has just been scored
            self._sizes = self._counted(rows.groups(data)[rows.real(data)])
            self._tau = self._temperature(data)
        return super().train_mini_batch(data)

    def train_batch(self, data: TensorDict) -> Any:
        """One step."""
        if self.settings is None:
            return super().train_batch(data)
        data, told = self._weighed(data)
        self._steps += 1
        output = super().train_batch(data)
        if output is not None:
            tu.get(output, "metrics").update(told)
        return output

    def save_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> Any:
        """verl's, and the state of the temperature's schedule."""
        found = super().save_checkpoint(local_path, *arguments, **options)
        if self.settings is not None:
            save_schedule(local_path, self.rank, self.schedule)
        return found

    def load_checkpoint(self, local_path: str, *arguments: Any, **options: Any) -> Any:
        if self.settings is not None and local_path is not None:
            load_schedule(local_path, self.rank, self.schedule)
        return super().load_checkpoint(local_path, *arguments, **options)

    @property
    def _group(self) -> Any:
        return self.engine.get_data_parallel_group()

    def _counted(self, ids: Tensor) -> dict[int, int]:
        """How many rows each group has over all ranks."""
        found = torch.cat(Ranks(self._group).gather(ids.to(self.device_name)))
        everyone, counts = torch.unique(found, return_counts=True)
        return dict(zip(everyone.tolist(), counts.tolist(), strict=True))

    def _temperature(self, data: TensorDict) -> float:
        """By the rollout's mean reward, and its mean entropy as a share of the largest."""
        assert self.settings is not None
        if self.settings.tau_schedule == "constant":
            return self.settings.tau
        chosen = rows.real(data)
        reward = rows.rewards(data)[chosen]
        mask = rows.on_host(data, "response_mask")[chosen].double()
        entropy = (rows.on_host(data, "entropy")[chosen].double() * mask).sum()
        sums = torch.stack([reward.sum(), torch.tensor(float(len(reward))), entropy, mask.sum()]).to(
            self.device_name
        )
        dist.all_reduce(sums, group=self._group)
        most = torch.log(torch.tensor(float(self.model_config.hf_config.get_text_config().vocab_size)))
        reward_mean = float(sums[0] / sums[1])
        if self.settings.tau_schedule == "hybrid":  # whose rewards are shares
            reward_mean = min(1.0, max(0.0, reward_mean))
        return float(
            self.schedule.update(entropy=float((sums[2] / sums[3] / most).clamp(0, 1)), reward=reward_mean)
        )

    def _weighed(self, data: TensorDict) -> tuple[TensorDict, dict[str, float]]:
        """The batch with the coefficients of its rows, without those of groups that have none."""
        assert self.settings is not None
        reduction = self.settings.logp_reduction
        chosen, ids = rows.real(data), rows.groups(data)
        cut = [group for group, size in self._counted(ids[chosen]).items() if size != self._sizes[group]]
        if cut:
            raise ValueError(f"a mini-batch cuts {len(cut)} groups: set trainer.v1.trainer_mode=adpo_sync")
        mask = rows.on_host(data, "response_mask")
        before = rows.reduced(rows.on_host(data, "old_log_probs"), mask, reduction)
        anchor = before
        if self.settings.anchor == "fixed":
            anchor = rows.reduced(rows.on_host(data, "ref_log_prob"), mask, reduction)
        logp = before if self._steps == 0 else self._scored(data, reduction).to(before)
        self._refuse_odd(logp[chosen], anchor[chosen])
        device = self.device_name
        found = exact.coefficients(
            self.objective,
            logp[chosen].to(device),
            ids[chosen].to(device),
            anchor[chosen].to(device),
            tau=self._tau,
            process_group=self._group,
            rewards=rows.rewards(data)[chosen].to(device),
        )
        c = torch.zeros(len(ids), dtype=torch.float64)
        c[chosen] = found.coefficients.cpu()
        data[WEIGHT] = c.to(data["loss_mask"].device)
        kept = self._live(c)
        told = {f"adpo/{name}": float(value) for name, value in found.diagnostics._asdict().items()}
        told |= {"adpo/loss": float(found.loss), "adpo/tau": self._tau}
        left_out = 1 - len(kept) / len(c)
        told |= {"adpo/rows_left_out": left_out, "adpo/scored": float(self._steps > 0)}
        return (data if len(kept) == len(c) else tu.index_select_tensor_dict(data, kept)), told

    def _scored(self, data: TensorDict, reduction: str) -> Tensor:
        """By the policy as it is now, without gradient, in the micro-batches of training."""
        for key in KEYS:
            if key not in data.keys():  # noqa: SIM118 (not a dictionary)
                tu.assign_non_tensor(data, **{key: getattr(self.engine_config, key)})
        if "use_remove_padding" not in data.keys():  # noqa: SIM118
            tu.assign_non_tensor(data, use_remove_padding=self.model_config.get("use_remove_padding", False))
        with self.engine.eval_mode(disable_auto_offload=True), then_sharded(self.engine.module):
            found = self.engine.infer_batch(data, loss_function=None)
        return rows.scored(found["model_output"], data, reduction).cpu()

    def _refuse_odd(self, *values: Tensor) -> None:
        """In every process, or the others would wait for this one."""
        odd = torch.tensor([sum(int((~torch.isfinite(one)).sum()) for one in values)], device=self.device_name)
        dist.all_reduce(odd, group=self._group)
        if int(odd):
            raise ValueError(
                f"{int(odd)} log-probabilities of completions are not finite: the policy has diverged"
            )

    def _live(self, c: Tensor) -> list[int]:
        """Rows that have a gradient, first; as many on each rank, and whole micro-batches."""
        order = torch.argsort((c == 0).int(), stable=True).tolist()
        most = torch.tensor([max(1, int((c != 0).sum()))], device=self.device_name)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        step = 1 if self.engine_config.use_dynamic_bsz else self.engine_config.micro_batch_size_per_gpu
        return sorted(order[: min(len(order), -(-int(most) // step) * step)])
