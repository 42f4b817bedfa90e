"""The former name of `adpo.integrations.group_step` and `adpo.integrations.sharding`, kept for one version."""

import warnings

from adpo.integrations.group_step import ByIndex, Passes, one_thread
from adpo.integrations.sharding import SHARDED, is_sharded, then_sharded

__all__ = ["SHARDED", "ByIndex", "Passes", "is_sharded", "one_thread", "then_sharded"]
warnings.warn(
    "adpo.integrations.passes is now adpo.integrations.group_step and adpo.integrations.sharding",
    DeprecationWarning,
    stacklevel=2,
)
