"""What the rows of a batch of verl's say, one number each."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding


def padded(data: TensorDict, name: str) -> Tensor:
    """``[rows, longest response]``, where the batch is."""
    found: Tensor = data.select(name).to_padded_tensor()[name]
    return found


def on_host(data: TensorDict, name: str) -> Tensor:
    """The same on the CPU, where the tables are put together."""
    return padded(data, name).cpu()


def reduced(token_logp: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """Sum or mean over the tokens of a response, ``[rows]``."""
    mask = mask.to(token_logp)
    total = (token_logp[:, : mask.shape[1]] * mask[:, : token_logp.shape[1]]).sum(-1)
    return total if reduction == "sum" else total / mask.sum(-1).clamp(min=1)


def scored(model_output: Any, data: TensorDict, reduction: str) -> Tensor:
    """Log-probabilities of responses in what a pass gave, ``[rows]``."""
    return reduced(no_padding_2_padding(model_output["log_probs"], data), padded(data, "response_mask"), reduction)


def groups(data: TensorDict) -> Tensor:
    """Of each row a number that is the same for its group, in every process."""
    found = [hashlib.sha256(str(uid).encode()).digest()[:8] for uid in tu.get(data, "uid")]
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in found], dtype=torch.int64)


def rewards(data: TensorDict) -> Tensor:
    """The estimator writes a row's reward on all its tokens."""
    return on_host(data, "returns")[:, 0].double()


def real(data: TensorDict) -> Tensor:
    """verl fills batches up with rows that have no tokens to learn from."""
    return on_host(data, "response_mask").sum(-1) > 0
