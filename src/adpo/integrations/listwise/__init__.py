"""Offline training on lists of completions with rewards or ranks (`ListwiseTrainer`, `ListwiseConfig`)."""

from adpo.integrations.listwise.config import ListwiseConfig
from adpo.integrations.listwise.trainer import ListwiseTrainer

__all__ = ["ListwiseConfig", "ListwiseTrainer"]
