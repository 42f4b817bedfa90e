"""Bodies to control: many copies of an environment side by side, and what a policy earns in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

Act = Callable[[Tensor], Tensor]
"""States ``[copies, states]`` to actions in [-1, 1], ``[copies, actions]``."""


def copies(name: str, count: int) -> Any:
    """So many of an environment, in this process; an episode that ends begins again in the same step."""
    return gymnasium.make_vec(
        name,
        num_envs=count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )


def sizes(world: Any) -> tuple[int, int]:
    """Numbers in a state and in an action."""
    return world.single_observation_space.shape[0], world.single_action_space.shape[0]


def scaled(world: Any, actions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """From [-1, 1] to the bounds of the environment."""
    space = world.single_action_space
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
