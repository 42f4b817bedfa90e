"""Public names of earlier versions: they work for one version more, with a `DeprecationWarning`.

One table for all of them. A module that had such a name ends with ``__getattr__ = renamed(__name__)``, behind
``if not TYPE_CHECKING``, so that a type checker knows the new names alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

RENAMED = {
    "adpo.alpha": "adpo.divergences.alpha",
    "adpo.soft": "adpo.targets.soft",
    "adpo.teacher": "adpo.targets.teacher",
    "adpo.anchors.Self": "adpo.anchors.Snapshot",
    "adpo.core.groups.Evidence": "adpo.core.groups.Groups",
    "adpo.core.presets.top1": "adpo.presets.anchored_top1",
    "adpo.trainers.checkpoints.checkpoint_files.SafeCheckpoints": (
        "adpo.trainers.checkpoints.safe_checkpoints.SafeCheckpoints"
    ),
    "adpo.trainers.group_step.is_sharded": "adpo.trainers.sharding.is_sharded",
    "adpo.trainers.group_step.then_sharded": "adpo.trainers.sharding.then_sharded",
}
"""Old name: new name, both from the package on."""


def renamed(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module whose names have changed.

    >>> renamed("adpo")("rewards_of")
    Traceback (most recent call last):
        ...
    AttributeError: module 'adpo' has no attribute 'rewards_of'
    """

    def find(name: str) -> Any:
        new = RENAMED.get(f"{module}.{name}")
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", new, stacklevel=3)
        return resolve_name(new)

    return find


def warn(old: str, new: str, stacklevel: int = 3) -> None:
    """Say that ``old`` is called ``new`` now; the line that is shown is that of the caller's caller."""
    message = f"{old} is now called {new}; the old name will be removed in the next version"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)
