"""What is measured of a policy, on clean test contexts.

WinMass is the probability mass on the item with the best clean reward. It mixes two things, whether the ranking
is right and how sharp the policy is, so it is given three times: *sampled* (the policy as it is), *greedy* (of
the argmax policy: top-1 accuracy), and *calibrated* (policy^s, with the sharpness s that makes the observed
winners of held-out noisy lists most likely).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adpo.experiments.bandits import fleet
from adpo.experiments.bandits.world import Worlds
from adpo.experiments.stacked import Weights

SHARPNESS = torch.logspace(-1, 2, 25)


class Measures(NamedTuple):
    """One number per replica, ``[replicas]``."""

    sampled: Tensor
    greedy: Tensor
    calibrated: Tensor
    regret: Tensor  # best clean reward less the policy's mean
    entropy: Tensor  # nats
    anchor_kl: Tensor  # KL(policy || reference)
    worst: Tensor  # mass on the item with the worst clean reward


class Exam:
    """Test contexts and held-out lists of a job, drawn once."""

    def __init__(self, worlds: Worlds, reference: Weights) -> None:
        self.contexts = worlds.test_contexts()
        self.truth = worlds.clean_rewards(self.contexts)
        self.best = self.truth.argmax(-1, keepdim=True)
        self.worst = self.truth.argmin(-1, keepdim=True)
        self.log_reference = fleet.log_policy(reference, self.contexts)
        self.lists = worlds.held_out()
        rewards = worlds.observed(self.lists, self.lists.items)
        self.winner = rewards.argmax(-1, keepdim=True)

    @torch.no_grad()
    def measure(self, weights: Weights) -> Measures:
        log_policy = fleet.log_policy(weights, self.contexts)
        policy = log_policy.exp()
        sharp = torch.softmax(log_policy * self._sharpness(weights).view(-1, 1, 1), -1)
        reward = (policy * self.truth).sum(-1)
        return Measures(
            sampled=policy.gather(-1, self.best).mean((1, 2)),
            greedy=(policy.argmax(-1, keepdim=True) == self.best).float().mean((1, 2)),
            calibrated=sharp.gather(-1, self.best).mean((1, 2)),
            regret=(self.truth.amax(-1) - reward).mean(1),
            entropy=-(policy * log_policy).sum(-1).mean(1),
            anchor_kl=(policy * (log_policy - self.log_reference)).sum(-1).mean(1),
            worst=policy.gather(-1, self.worst).mean((1, 2)),
        )

    def _sharpness(self, weights: Weights) -> Tensor:
        """The exponent under which the observed winners of the held-out lists are most likely, [replicas]."""
        listed = fleet.log_policy(weights, self.lists.contexts).gather(-1, self.lists.items)
        likelihood = torch.stack(
            [torch.log_softmax(s * listed, -1).gather(-1, self.winner).mean((1, 2)) for s in SHARPNESS]
        )
        return SHARPNESS[likelihood.argmax(0)]
