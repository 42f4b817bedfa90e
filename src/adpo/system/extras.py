"""Optional parts of the installation."""

from __future__ import annotations

import importlib.util


def require(command: str, extra: str, *packages: str) -> None:
    """Complain in one line about packages that a command needs and that are not there."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"{command} needs {', '.join(missing)}: pip install 'adpo[{extra}]'")
