"""The flat rows of every rank, as the tables of an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adpo.core.groups import from_flat, to_flat, to_table
from adpo.core.objective import Diagnostics, Objective
from adpo.core.signals import PER_GROUP, Signals, by_name
from adpo.system.ranks import Ranks


@dataclass(frozen=True)
class RowGroups:
    """The flat rows of this rank, and the objective over any set of them that holds its groups whole."""

    objective: Objective
    row_ids: Tensor  # [rows], of this rank
    ids: Tensor  # [groups], of all ranks, ascending
    sizes: Tensor  # [groups]
    anchor: Tensor  # [rows], float64
    tau: float | Tensor  # a number or [groups]
    of_rows: Mapping[str, Tensor]
    of_groups: Mapping[str, Tensor]
    everyone: Mapping[str, Tensor]  # ids, anchor and signals of the rows of all ranks, one rank after the other
    lengths: list[int]  # rows of each rank

    @classmethod
    def of(
        cls,
        objective: Objective,
        group_ids: Tensor,
        anchor_logp: Tensor | None,
        tau: float | Tensor | None,
        signals: Signals,
        ranks: Ranks,
        check: Callable[[], object] = lambda: "",
    ) -> RowGroups:
        """Everything a caller handed over, on the device of the ids and with one value per row or group.

        All of it is validated, on all ranks, and so is what ``check`` looks at: bad input costs no pass.
        """
        device = group_ids.device
        ranks.together(lambda: (check(), _check_rows(group_ids, anchor_logp, signals)), device)
        of_ranks = ranks.gather(group_ids)
        lengths, every_id = [len(part) for part in of_ranks], torch.cat(of_ranks)
        ids, sizes = torch.unique(every_id, return_counts=True)
        # By name, so that ranks exchange them in one order.
        given = {
            name: values.detach().to(device)
            for name, values in sorted(by_name(signals).items())
            if values is not None
        }
        of_groups = {name: given.pop(name) for name in PER_GROUP if name in given}
        if anchor_logp is None:
            anchor = torch.zeros(len(group_ids), dtype=torch.float64, device=device)
        else:
            anchor = anchor_logp.detach().to(device, torch.float64)
        chosen = objective.tau if tau is None else tau
        if isinstance(chosen, Tensor):
            chosen = chosen.to(device).expand_as(ids) if chosen.numel() == 1 else chosen.to(device)
        columns = {"anchor_logp": anchor, **given}
        everyone = {name: torch.cat(ranks.gather(values.to(torch.float64))) for name, values in columns.items()}
        everyone["ids"] = every_id
        groups = cls(objective, group_ids, ids, sizes, anchor, chosen, given, of_groups, everyone, lengths)
        groups._validate(ranks)
        return groups

    def _validate(self, ranks: Ranks) -> None:
        """Refuse on every rank what the objective would refuse, from its tables with any log-probabilities."""
        columns = {"logp": torch.zeros_like(self.everyone["anchor_logp"]), **self.everyone}

        def check() -> None:
            of_groups = {"tau": self.tau, **self.of_groups} if isinstance(self.tau, Tensor) else self.of_groups
            for name, values in of_groups.items():
                if values.shape != self.ids.shape:
                    raise ValueError(f"{name} must be [groups] = {list(self.ids.shape)}; got {list(values.shape)}")
            with torch.no_grad():
                self.objective.loss(**self._arranged(columns)[0])

        ranks.together(check, self.ids.device)

    def whole(self, rows: Tensor) -> bool:
        """Whether these rows of one rank are all the rows of their groups."""
        present, count = torch.unique(self.row_ids[rows], return_counts=True)
        return torch.equal(count, self.sizes[torch.searchsorted(self.ids, present)])

    def checked(self, scored: Tensor, rows: Tensor) -> Tensor:
        """The log-probabilities that came back for these rows: one each, and finite."""
        values = scored.detach().to(self.anchor)
        if values.shape != rows.shape:
            raise ValueError(f"score must return one value for each of {len(rows)} rows; got {list(values.shape)}")
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            row = rows[bad[0]]
            raise ValueError(
                f"the log-probability of row {int(row)} (group {int(self.row_ids[row])}) is "
                f"{values[bad[0]].item()}"
            )
        return values

    def coefficients(self, rows: Tensor, logp: Tensor, ranks: Ranks | None = None) -> Tensor:
        """dloss/dlogp of these rows, in their order; with ``ranks``, together with those of the other ranks."""
        return self._coefficients(*self._gathered(rows, logp, ranks), ranks)

    def all_coefficients(self, logp: Tensor, ranks: Ranks) -> Tensor:
        """Those of all rows of this rank."""
        return self._coefficients(self._of_everyone(logp, ranks), self.lengths, ranks)

    def _coefficients(self, columns: dict[str, Tensor], lengths: list[int], ranks: Ranks | None) -> Tensor:
        tables, index = self._arranged(columns)
        weights = tables.pop("weights", None)  # what is rounding and what is signal does not depend on them
        c = self.objective.coefficients(reduction="sum", **tables)
        c = torch.where(self.objective.live(c, tables["tau"]).unsqueeze(-1), c, 0.0)
        total: float | Tensor = max(1, len(self.ids))
        if weights is not None:
            c, total = c * weights.to(c).unsqueeze(-1), self.of_groups["weights"].to(c).sum()
            total = torch.where(total > 0, total, 1.0)
        return torch.split(to_flat(c, index) / total, lengths)[ranks.rank if ranks else 0]

    def summary(self, logp: Tensor, ranks: Ranks) -> tuple[Tensor, Diagnostics]:
        """Loss and diagnostics over all groups; a row that was never scored stands at the anchor."""
        tables, _ = self._arranged(self._of_everyone(torch.where(logp.isnan(), self.anchor, logp), ranks))
        return self.objective.loss(**tables).detach(), self.objective.diagnostics(**tables)

    def _of_everyone(self, logp: Tensor, ranks: Ranks) -> dict[str, Tensor]:
        """All rows of all ranks: log-probabilities alone have to travel."""
        return {"logp": torch.cat(ranks.gather(logp.to(torch.float64))), **self.everyone}

    def _gathered(self, rows: Tensor, logp: Tensor, ranks: Ranks | None) -> tuple[dict[str, Tensor], list[int]]:
        """The columns of these rows, of all ranks one after the other, and the rows of each rank."""
        gather = ranks.gather if ranks else lambda values: [values]
        ids = gather(self.row_ids[rows])
        columns = {"logp": logp, "anchor_logp": self.anchor, **self.of_rows}
        flat = {name: torch.cat(gather(values[rows].to(torch.float64))) for name, values in columns.items()}
        return {"ids": torch.cat(ids), **flat}, [len(part) for part in ids]

    def _arranged(self, columns: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """The arguments of the objective for these rows, and the cell of each row."""
        flat = dict(columns)
        present = flat.pop("ids")
        table, mask, index = from_flat(flat.pop("logp"), present)
        shape = (mask.shape[0], mask.shape[1])
        which = torch.searchsorted(self.ids, torch.unique(present))
        of_groups = {name: values[which] for name, values in self.of_groups.items()}
        tau = self.tau[which] if isinstance(self.tau, Tensor) else self.tau
        arranged = {name: to_table(values, index, shape) for name, values in flat.items()}
        return {"logp": table, "mask": mask, "tau": tau, **arranged, **of_groups}, index


def _check_rows(group_ids: Tensor, anchor_logp: Tensor | None, signals: Signals) -> list[str]:
    """The names of what is given, one value for each row; those of groups have to wait for the groups."""
    if "mask" in signals:
        raise TypeError("rows are real candidates: leave padding rows out instead of passing a mask")
    if group_ids.ndim != 1:
        raise ValueError(f"group_ids must be [rows]; got {list(group_ids.shape)}")
    given = {name: values for name, values in by_name(signals).items() if values is not None}
    of_rows = {name: values for name, values in given.items() if name not in PER_GROUP}
    for name, values in {"anchor_logp": anchor_logp, **of_rows}.items():
        if values is not None and values.shape != group_ids.shape:
            raise ValueError(f"{name} must be [rows] = {list(group_ids.shape)}; got {list(values.shape)}")
    return [*sorted(given), f"group_ids of {group_ids.dtype}"]
