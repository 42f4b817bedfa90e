"""TRL: online training on verifiable rewards (`ADPOTrainer`, `ADPOConfig`)."""

from adpo.integrations.guards import TrainingStoppedError
from adpo.integrations.trl.config import ADPOConfig
from adpo.integrations.trl.online import ADPOTrainer

__all__ = ["ADPOConfig", "ADPOTrainer", "TrainingStoppedError"]
