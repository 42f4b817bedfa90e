"""Teachers: how they were trained, what they earn, and the files they come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adpo.experiments.distill import worlds
from adpo.experiments.distill.actor import Actor, deterministic, load_actor, save_actor
from adpo.experiments.distill.sac import Recipe
from adpo.experiments.distill.training import Plan, Progress, Training, checkpoint_of
from adpo.system.devices import best_device
from adpo.system.provenance import provenance

SHIPPED = Path(__file__).parent / "shipped"
PLANS = {
    "HalfCheetah-v5": Plan(
        "HalfCheetah-v5",
        steps=1_000_000,
        exam_every=25_000,
        recipe=Recipe(smooth=True, actor_hidden=128, actor_decay=0.03, entropy_by_action=0.0),
    ),
    "Hopper-v5": Plan(
        "Hopper-v5",
        steps=500_000,
        exam_every=25_000,
        recipe=Recipe(smooth=True, actor_hidden=64, actor_decay=0.1, entropy_by_action=-0.5),
    ),
}
"""Policies that can be copied: small, smooth and wide; soft actor-critic as it is gives jagged, narrow ones."""
EXAM_SEED = 2 * 10**6
"""Of the episodes on the card: no training and no choice of a checkpoint has seen them."""


def train_teacher(
    name: str,
    out: Path,
    resume: bool,
    on_progress: Callable[[Progress], None],
    minutes: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    episodes: int = 50,
) -> dict[str, Any]:
    """Train, or go on, for so many minutes or to the end; write a checkpoint, and the best actor with its card."""
    worlds.known(name)
    plan = replace(PLANS.get(name, Plan(name)), seed=seed)
    plan = plan if steps is None else replace(plan, steps=steps)
    device = best_device()
    checkpoint = checkpoint_of(out, name)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; expected a folder")
    if resume and not checkpoint.exists():
        raise ValueError(f"there is no {checkpoint} to go on from: leave out --resume")
    if not resume and checkpoint.exists():
        raise ValueError(f"{checkpoint} is there already: add --resume, or choose another --out")
    made = Training(plan, out, device)
    if resume:
        made.load()
    torch.set_float32_matmul_precision("high")  # small products on a GPU: TF32, which is faster
    progress = made.run(None if minutes is None else 60 * minutes, on_progress)
    if not made.best:
        raise ValueError(
            f"no exam was taken in {progress.steps} steps: give it more time, and go on with --resume"
        )
    actor = Actor(**made.agent.actor.sizes)
    actor.load_state_dict(made.best)
    card = {
        "environment": name,
        "algorithm": "soft actor-critic",
        "steps": progress.steps,
        "of": plan.steps,
        "seed": seed,
        "recipe": asdict(plan.recipe),
        "training_seconds": round(progress.seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **examined(actor, name, episodes),
        **provenance(),
    }
    save_actor(actor, out / f"{name}.safetensors", card)
    return card


def told(card: dict[str, Any]) -> str:
    """A card as one line."""
    ways = ", ".join(
        f"{way} {card[way]['mean']:.0f} ± {card[way]['std']:.0f} (lowest {card[way]['lowest']:.0f})"
        for way in ("deterministic", "stochastic")
    )
    made = f"{card['steps']:,} of {card['of']:,} steps"
    return f"{card['environment']}: {ways} over {card['episodes']} episodes, after {made}"


def examined(actor: Actor, name: str, episodes: int) -> dict[str, Any]:
    """Mean and spread of whole episodes, without noise and with it."""
    draw = torch.Generator().manual_seed(EXAM_SEED)

    def with_noise(states: torch.Tensor) -> torch.Tensor:
        policy = actor(states)
        return torch.tanh(policy.draw(torch.randn(policy.mean.shape, generator=draw)))

    found: dict[str, Any] = {"episodes": episodes}
    ways = {"deterministic": lambda states: deterministic(actor, states), "stochastic": with_noise}
    for way, act in ways.items():
        earned = worlds.returns(name, act, episodes, EXAM_SEED)
        found[way] = {
            "mean": round(float(np.mean(earned)), 1),
            "std": round(float(np.std(earned, ddof=1)), 1),
            "lowest": round(min(earned), 1),
            "highest": round(max(earned), 1),
        }
    return found


def load_teacher(name: str, folder: Path = SHIPPED) -> tuple[Actor, dict[str, object]]:
    """An actor that came with the package, or from another folder, and its card."""
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        known = sorted(found.stem for found in folder.glob("*.safetensors"))
        raise ValueError(f"no teacher for {name!r} in {folder}; there are: {', '.join(known) or 'none'}")
    return load_actor(path)
