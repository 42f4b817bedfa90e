"""``python -m adpo``: the ``adpo`` command, for launchers that start modules."""

from adpo.cli import main

main()
