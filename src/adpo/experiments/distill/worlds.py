"""Bodies to control: many copies of an environment side by side, and what a policy earns in them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

Act = Callable[[Tensor], Tensor]
"""States ``[copies, states]`` to actions in [-1, 1], ``[copies, actions]``."""


@cache
def _quiet() -> None:
    """MuJoCo would write a file into the current folder about every attribute that a model should not have."""
    if importlib.util.find_spec("mujoco") is not None:
        import mujoco

        mujoco.set_mju_user_warning(
            lambda text: None if "deprecated" in text else warnings.warn(text, stacklevel=2)
        )


def copies(name: str, count: int) -> Any:
    """So many of an environment, in this process; an episode that ends begins again in the same step."""
    _quiet()
    return gymnasium.make_vec(
        name,
        num_envs=count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )


def alone(name: str) -> Any:
    """One that can be looked at, by a camera that follows a body."""
    _quiet()
    bodies = "mujoco" in str(gymnasium.spec(name).entry_point)
    options: dict[str, Any] = {"camera_name": "track"} if bodies else {}
    return gymnasium.make(name, render_mode="rgb_array", **options)


def known(name: str) -> None:
    """Complain in one line about an environment that is none, or has other actions than numbers in bounds."""
    _quiet()
    try:
        world = gymnasium.make(name)
    except gymnasium.error.Error as error:
        raise ValueError(f"no environment {name!r}: {str(error).splitlines()[0]}") from None
    except ImportError:  # MuJoCo is missing
        raise ValueError(f"{name} needs mujoco: pip install 'adpo[control]'") from None
    try:
        if (
            not isinstance(world.action_space, gymnasium.spaces.Box)
            or len(world.observation_space.shape or ()) != 1
        ):
            raise ValueError(
                f"{name}: expected actions that are numbers in bounds, and states that are a list of numbers"
            )
    finally:
        world.close()


def sizes(world: Any) -> tuple[int, int]:
    """Numbers in a state and in an action."""
    return world.single_observation_space.shape[0], world.single_action_space.shape[0]


def scaled(world: Any, actions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """From [-1, 1] to the bounds of the environments."""
    return in_bounds(world.single_action_space, actions)


def in_bounds(space: Any, actions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (space.low + 0.5 * (actions + 1) * (space.high - space.low)).astype(space.dtype)
    return found


@torch.no_grad()
def returns(name: str, act: Act, episodes: int, seed: int, side_by_side: int = 10) -> list[float]:
    """What whole episodes earn: the same number from every copy, so that short ones are not preferred."""
    count = min(side_by_side, episodes)
    world = copies(name, count)
    try:
        states, _ = world.reset(seed=seed)
        earned, found = np.zeros(count), [[] for _ in range(count)]  # type: ignore[var-annotated]
        wanted = -(-episodes // count)
        while any(len(of_copy) < wanted for of_copy in found):
            actions = act(torch.from_numpy(states).float()).cpu().numpy()
            states, rewards, ended, cut, _ = world.step(scaled(world, actions))
            earned += rewards
            for number in np.flatnonzero(ended | cut):
                found[number].append(float(earned[number]))
                earned[number] = 0.0
    finally:
        world.close()
    rounds = [of_copy[place] for place in range(wanted) for of_copy in found]
    return rounds[:episodes]
