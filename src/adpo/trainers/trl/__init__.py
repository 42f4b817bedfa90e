"""TRL: online training on verifiable rewards (`ADPOTrainer`, `ADPOConfig`)."""

from adpo.trainers.monitors.guards import TrainingStoppedError
from adpo.trainers.trl.config import ADPOConfig
from adpo.trainers.trl.online import ADPOTrainer

__all__ = ["ADPOConfig", "ADPOTrainer", "TrainingStoppedError"]
