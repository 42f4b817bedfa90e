"""Groups of an optimizer step as people read them: what was asked and said, with rewards and coefficients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adpo.integrations.trl.rows import Rows


class Seen(NamedTuple):
    """The rows of a step on this process, and ``c = dloss/dlogp`` of its members."""

    rows: Rows
    members: Tensor  # numbers of rows
    coefficients: Tensor

    def groups(self, tokenizer: Any, most: int) -> list[dict[str, Any]]:
        """Some of them, those with a gradient first; every member is ``text``, ``reward`` and ``c``."""
        of_members = self.rows["groups"][self.members].to(self.coefficients.device)
        numbers, place = torch.unique(of_members, return_inverse=True)
        force = torch.zeros(len(numbers), dtype=torch.float64, device=place.device)
        force.index_add_(0, place, self.coefficients.abs().double())
        first = torch.sort(force == 0, stable=True).indices[:most]
        return [self._group(tokenizer, (place == number).nonzero().squeeze(1)) for number in first.tolist()]

    def _group(self, tokenizer: Any, chosen: Tensor) -> dict[str, Any]:
        where = self.members[chosen.to(self.members.device)]
        rows = {name: values[where] for name, values in self.rows.items()}
        pairs = zip(rows["completion_ids"], rows["completion_mask"], strict=True)
        asked = rows["prompt_ids"][0][rows["prompt_mask"][0].bool()]
        texts = [tokenizer.decode(ids[mask.bool()], skip_special_tokens=True) for ids, mask in pairs]
        rewards, coefficients = rows["rewards"].tolist(), self.coefficients[chosen].tolist()
        return {
            "prompt": tokenizer.decode(asked, skip_special_tokens=True),
            "members": [
                {"text": text, "reward": reward, "c": c}
                for text, reward, c in zip(texts, rewards, coefficients, strict=True)
            ],
        }
