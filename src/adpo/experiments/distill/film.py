"""Teacher and student side by side, as a strip of pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from adpo.experiments.distill import students, worlds
from adpo.experiments.distill.actor import Gaussian
from adpo.experiments.distill.lessons import Policy
from adpo.experiments.stacked import Weights

MOMENTS = (0, 20, 40, 60, 80, 100, 150, 200)
"""Steps of the pictures."""


def strip(name: str, teacher: Policy, student: Weights, path: Path, seed: int) -> str | None:
    """Both in the same episode, without noise; what kept it from being drawn, where something did."""
    os.environ.setdefault("MUJOCO_GL", "egl")

    def of_student(states: torch.Tensor) -> Gaussian:
        return Gaussian(*(part[0] for part in students.policy(student, states.unsqueeze(0))))

    try:
        rows = [_pictures(name, policy, seed) for policy in (teacher, of_student)]
    except Exception as error:  # a machine that cannot render raises many kinds
        reason = str(error).splitlines()[0] if str(error) else ""
        return f"this machine does not render ({type(error).__name__}: {reason[:200]})"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(MOMENTS), figsize=(2 * len(MOMENTS), 4.4), squeeze=False)
    for axis_row, pictures, label in zip(axes, rows, ("teacher", "student"), strict=True):
        for axis, moment, picture in zip(axis_row, MOMENTS, pictures, strict=True):
            axis.set_xticks([])
            axis.set_yticks([])
            if picture is None:
                axis.text(0.5, 0.5, "fallen", ha="center")
            else:
                axis.imshow(picture)
            axis.set_title(f"{label}, step {moment}", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
    return None


@torch.no_grad()
def _pictures(name: str, policy: Policy, seed: int) -> list[Any]:
    world = worlds.alone(name)
    try:
        state, _ = world.reset(seed=seed)
        found: list[Any] = []
        running = True
        for step in range(max(MOMENTS) + 1):
            if step in MOMENTS:
                found.append(world.render() if running else None)
            if running:
                action = torch.tanh(policy(torch.from_numpy(state).float().unsqueeze(0)).mean)[0].numpy()
                state, _, ended, cut, _ = world.step(worlds.in_bounds(world.action_space, action))
                running = not (ended or cut)
        return found
    finally:
        world.close()
