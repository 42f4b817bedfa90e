"""The device that models are put on."""

from __future__ import annotations

import torch


def best_device() -> torch.device:
    """The accelerator, if there is one that has float64, which the tables of the core are in: else the CPU.

    Torch may have been built for an accelerator that is not there; Apple's (MPS) has no float64.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if device is None or device.type == "mps" else device
