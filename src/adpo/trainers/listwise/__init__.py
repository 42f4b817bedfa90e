"""Offline training on lists of completions with rewards or ranks (`ListwiseTrainer`, `ListwiseConfig`)."""

from adpo.trainers.listwise.config import ListwiseConfig
from adpo.trainers.listwise.trainer import ListwiseTrainer

__all__ = ["ListwiseConfig", "ListwiseTrainer"]
