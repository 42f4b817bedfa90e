"""Where models are put."""

import torch

from adpo.system.devices import best_device


def test_an_accelerator_that_is_not_there_is_not_used(monkeypatch):
    """A build for GPUs knows its kind of device on machines without one, too."""

    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    assert best_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    assert best_device() == torch.device("cuda")


def test_an_accelerator_without_float64_is_not_used(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert best_device() == torch.device("cpu")
