"""A teacher, trained: environments on the CPU, updates on the device, both at the same time.

Training goes on from a checkpoint: networks, optimizers, the entropy weight, and the latest transitions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from adpo.experiments.distill import worlds
from adpo.experiments.distill.sac import Agent, Recipe, Transitions, updates

LATEST = 60_000
"""Transitions that a checkpoint keeps."""


@dataclass(frozen=True)
class Plan:
    """One teacher."""

    name: str
    steps: int = 1_000_000
    side_by_side: int = 8
    seed: int = 0
    exam_every: int = 50_000
    exam_episodes: int = 10
    recipe: Recipe = field(default_factory=Recipe)


@dataclass
class Progress:
    """What a run has done so far."""

    steps: int = 0
    of: int = 1
    seconds: float = 0.0
    exams: list[dict[str, float]] = field(default_factory=list)
    learning: bool = False  # the random steps are over

    @property
    def share(self) -> float:
        return self.steps / self.of


def checkpoint_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.checkpoint.safetensors"


class Training:
    """``run()`` until the steps are made or the time is over; the agent with the best exam is kept beside it."""

    def __init__(self, plan: Plan, folder: Path, device: torch.device) -> None:
        self.plan, self.folder, self.device = plan, folder, device
        self.checkpoint = checkpoint_of(folder, plan.name)
        self.world = worlds.copies(plan.name, plan.side_by_side)
        states, actions = worlds.sizes(self.world)
        torch.manual_seed(plan.seed)
        self.draw = np.random.default_rng(plan.seed)
        self.agent = Agent(states, actions, plan.recipe, device)
        self.transitions = Transitions(states, actions, plan.recipe.kept, device)
        self.progress = Progress(of=plan.steps)
        self.best: dict[str, Tensor] = {}
        self.best_return = -float("inf")
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, seconds: float | None, on_progress: Callable[[Progress], None]) -> Progress:
        """Every environment step is followed by one update, as soon as the random ones are over."""
        plan, progress = self.plan, self.progress
        began, before = time.monotonic(), progress.seconds
        states, _ = self.world.reset(seed=plan.seed + progress.steps)
        update: Callable[[], None] | None = None
        acting = plan.recipe.random_steps
        while progress.steps < plan.steps:
            if seconds is not None and time.monotonic() - began > seconds:
                break
            actions = self._actions(states, explore=progress.steps >= acting)
            if progress.steps >= acting:
                if update is None:
                    if plan.recipe.smooth and not progress.learning:
                        self.agent.actor.scale_states(self.transitions.latest(acting)["state"])
                    progress.learning = True
                    update = updates(self.agent, self.transitions, plan.side_by_side)
                update()  # on a GPU this returns at once: the environments move meanwhile
            states = self._moved(states, actions)
            progress.steps += plan.side_by_side
            progress.seconds = before + time.monotonic() - began
            if progress.steps % plan.exam_every < plan.side_by_side:
                self._exam()
                self.save()
                on_progress(progress)
        self.save()
        return progress

    def _actions(self, states: np.ndarray[Any, Any], explore: bool) -> np.ndarray[Any, Any]:
        if not explore:
            return self.draw.uniform(-1, 1, (len(states), self.world.single_action_space.shape[0]))
        found: np.ndarray[Any, Any] = self.agent.act(torch.from_numpy(states).float()).cpu().numpy()
        return found

    def _moved(self, states: np.ndarray[Any, Any], actions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """One step of every environment, remembered; the states they are in now."""
        now, rewards, ended, cut, info = self.world.step(worlds.scaled(self.world, actions))
        reached = now.copy()
        for number in np.flatnonzero(ended | cut):
            reached[number] = info["final_obs"][number]
        rows = {"state": states, "action": actions, "reward": rewards, "next_state": reached, "ended": ended}
        self.transitions.add(**{name: torch.from_numpy(np.asarray(values)) for name, values in rows.items()})
        found: np.ndarray[Any, Any] = now
        return found

    def _exam(self) -> None:
        """The mean of some episodes without noise."""
        plan = self.plan
        earned = worlds.returns(
            plan.name, lambda states: self.agent.act(states, explore=False), plan.exam_episodes, seed=10**6
        )
        score = {"steps": self.progress.steps, "mean": float(np.mean(earned)), "lowest": min(earned)}
        self.progress.exams.append(score)
        if score["mean"] > self.best_return:
            self.best_return = score["mean"]
            self.best = {name: value.detach().clone() for name, value in self.agent.actor.state_dict().items()}

    # What a checkpoint keeps.

    def save(self) -> None:
        tensors = {f"agent.{name}": value for name, value in self._tensors().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        tensors |= {f"transitions.{name}": rows for name, rows in self.transitions.latest(LATEST).items()}
        about = {
            "steps": self.progress.steps,
            "seconds": self.progress.seconds,
            "exams": self.progress.exams,
            "best": self.best_return,
            "learning": self.progress.learning,
        }
        part = self.checkpoint.with_suffix(".part")
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, part)
        part.replace(self.checkpoint)
        (self.folder / f"{self.plan.name}.progress.json").write_text(json.dumps(about, indent=1))

    def load(self) -> None:
        """Go on from the checkpoint in the folder."""
        try:
            self._load()
        except (OSError, LookupError, ValueError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{self.checkpoint} cannot be gone on from ({reason}): choose another --out"
            ) from None

    def _load(self) -> None:
        about = json.loads((self.folder / f"{self.plan.name}.progress.json").read_text())
        with safe_open(self.checkpoint, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        with torch.no_grad():
            for name, value in self._tensors().items():
                value.copy_(tensors[f"agent.{name}"])
        self.best = _under("best.", tensors)
        self.transitions.add(**_under("transitions.", tensors))
        self.progress = Progress(
            about["steps"], self.plan.steps, about["seconds"], about["exams"], about["learning"]
        )
        self.best_return = about["best"]

    def _tensors(self) -> dict[str, Tensor]:
        """All that training changes, by name."""
        agent = self.agent
        found: dict[str, Tensor] = {f"actor.{name}": value for name, value in agent.actor.state_dict().items()}
        found |= {f"critics.{i}": value for i, value in enumerate(agent.critics)}
        found |= {f"slow.{i}": value for i, value in enumerate(agent.slow)}
        found["log_alpha"] = agent.log_alpha
        for number, optimizer in enumerate(agent.optimizers):
            for place, parameter in enumerate(optimizer.param_groups[0]["params"]):
                state = optimizer.state[parameter]
                if not state:  # before the first step
                    state["step"] = torch.zeros((), device=self.device if self.device.type == "cuda" else "cpu")
                    state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
                found |= {f"optimizer.{number}.{place}.{name}": value for name, value in state.items()}
        return found


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
