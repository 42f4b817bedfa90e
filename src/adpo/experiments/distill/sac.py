"""Soft actor-critic, as one function that changes an agent in place: on a GPU it is captured as a graph.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018): two critics, the entropy weight learned.
The two critics are one stack of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adpo.experiments.distill.actor import Actor, Gaussian
from adpo.experiments.stacked import outputs


@dataclass(frozen=True)
class Recipe:
    """How a teacher is trained."""

    hidden: int = 256
    actor_hidden: int | None = None  # where it is another than that of the critics
    smooth: bool = False  # an actor of tanh layers on scaled states
    actor_decay: float = 0.0  # of its weights
    entropy_by_action: float = -1.0  # that is aimed at
    batch: int = 256
    learning_rate: float = 3e-4
    discount: float = 0.99
    polyak: float = 0.005
    kept: int = 1_000_000  # transitions
    random_steps: int = 10_000  # before the policy acts


class Transitions:
    """The latest so many, on the device of the agent."""

    def __init__(self, states: int, actions: int, kept: int, device: torch.device) -> None:
        self.widths = {"state": states, "action": actions, "reward": 1, "next_state": states, "ended": 1}
        self.table = torch.zeros(kept, sum(self.widths.values()), device=device)  # one, to be read at once
        self.kept, self.at = kept, 0
        self.filled = torch.zeros((), device=device)  # read inside the graph

    def add(self, **rows: Tensor) -> None:
        count = len(rows["reward"])
        place = (self.at + torch.arange(count)) % self.kept
        columns = [rows[name].float().view(count, width) for name, width in self.widths.items()]
        self.table[place.to(self.table.device)] = torch.cat(columns, 1).to(self.table.device)
        self.at += count
        self.filled.fill_(min(self.at, self.kept))

    def draw(self, count: int) -> dict[str, Tensor]:
        device = self.filled.device
        place = (torch.rand(count, device=device, dtype=torch.float64) * self.filled).long()
        return self.named(self.table[place])

    def latest(self, count: int) -> dict[str, Tensor]:
        """At most so many, oldest first."""
        count = min(self.at, self.kept, count)
        return self.named(self.table[(self.at - count + torch.arange(count)) % self.kept])

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        parts = dict(zip(self.widths, torch.split(rows, list(self.widths.values()), 1), strict=True))
        return {name: part.squeeze(1) if name in ("reward", "ended") else part for name, part in parts.items()}


class Agent:
    """Actor, two critics, their slow copies, and the weight of entropy."""

    def __init__(self, states: int, actions: int, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        width = recipe.actor_hidden or recipe.hidden
        self.actor = Actor(states, actions, width, recipe.smooth).to(device)
        self.critics = _two_critics(states + actions, recipe.hidden, device)
        self.slow = [value.detach().clone() for value in self.critics]
        self.log_alpha = torch.zeros((), device=device, requires_grad=True)
        self.target_entropy = recipe.entropy_by_action * actions
        on_gpu = device.type == "cuda"
        self.optimizers = [
            torch.optim.AdamW(
                parameters, lr=recipe.learning_rate, weight_decay=decay, fused=True, capturable=on_gpu
            )
            for parameters, decay in (
                (list(self.actor.parameters()), recipe.actor_decay),
                (self.critics, 0.0),
                ([self.log_alpha], 0.0),
            )
        ]

    def values(self, weights: list[Tensor], states: Tensor, actions: Tensor) -> Tensor:
        """Of both critics, ``[2, batch]``."""
        both = torch.cat([states, actions], -1).expand(2, -1, -1)
        return outputs(weights, both, torch.relu).squeeze(-1)

    def update(self, drawn: dict[str, Tensor], noise: Tensor, next_noise: Tensor) -> None:
        """One step of everything."""
        of_actor, of_critics, of_alpha = self.optimizers
        both = self.actor(torch.cat([drawn["state"], drawn["next_state"]]))
        policy, coming = (Gaussian(*parts) for parts in zip(*(part.chunk(2) for part in both), strict=True))
        u = policy.draw(noise)
        logp = policy.squashed_logp(u)
        alpha = self.log_alpha.detach().exp()
        entropy_off = (logp.detach() + self.target_entropy).mean()
        _step(of_alpha, -self.log_alpha * entropy_off)
        with torch.no_grad():
            next_u = coming.draw(next_noise)
            later = self.values(self.slow, drawn["next_state"], torch.tanh(next_u)).amin(0)
            later = later - alpha * coming.squashed_logp(next_u)
            target = drawn["reward"] + self.recipe.discount * (1 - drawn["ended"]) * later
        found = self.values(self.critics, drawn["state"], drawn["action"])
        _step(of_critics, 0.5 * (found - target).square().mean(1).sum())
        value = self.values(self.critics, drawn["state"], torch.tanh(u)).amin(0)
        _step(of_actor, (alpha * logp - value).mean())
        with torch.no_grad():
            torch._foreach_lerp_(self.slow, self.critics, self.recipe.polyak)

    @torch.no_grad()
    def act(self, states: Tensor, explore: bool = True) -> Tensor:
        policy = self.actor(states.to(self.device))
        return torch.tanh(policy.draw(torch.randn_like(policy.mean)) if explore else policy.mean)


def updates(agent: Agent, transitions: Transitions, count: int) -> Callable[[], None]:
    """So many updates as one call: on a GPU a graph, which the CPU starts and does not wait for."""
    shape = (agent.recipe.batch, transitions.widths["action"])

    def made() -> None:
        for _ in range(count):
            noises = [torch.randn(shape, device=agent.device) for _ in range(2)]
            agent.update(transitions.draw(agent.recipe.batch), *noises)

    if agent.device.type != "cuda":
        return made
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        made()  # what is set up once is not part of the graph
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made()
    return graph.replay


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Gradients of its own parameters alone."""
    parameters = optimizer.param_groups[0]["params"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()


def _two_critics(inputs: int, hidden: int, device: torch.device) -> list[Tensor]:
    """Matrices and biases in turn, uniform in ±1/sqrt(fan_in)."""
    weights = []
    for fan_in, fan_out in ((inputs, hidden), (hidden, hidden), (hidden, 1)):
        bound = 1 / math.sqrt(fan_in)
        for rows in (fan_in, 1):
            value = torch.empty(2, rows, fan_out, device=device).uniform_(-bound, bound)
            weights.append(value.requires_grad_())
    return weights
