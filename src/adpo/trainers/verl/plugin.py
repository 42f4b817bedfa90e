"""What verl loads: the entry point ``verl.plugins``, or ``VERL_USE_EXTERNAL_MODULES``."""

from verl.workers.engine_workers import ActorRolloutRefWorker

from adpo.trainers.verl import loss, trainer
from adpo.trainers.verl.worker import ADPOTrainingWorker

ActorRolloutRefWorker.actor_worker_cls = ADPOTrainingWorker
__all__ = ["loss", "trainer"]
