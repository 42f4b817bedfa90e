"""The device that models are put on."""

from __future__ import annotations

import torch


def best_device() -> torch.device:
    """The accelerator, if there is one: torch may have been built for one that is not there."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
