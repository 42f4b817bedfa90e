"""``python -m adpo.bench core [--quick]``, or ``preferences``."""

import argparse

parser = argparse.ArgumentParser(prog="python -m adpo.bench", description="Time and memory, as ratios in one run.")
parser.add_argument(
    "what",
    choices=["core", "preferences"],
    help="core: loss and gradient of every target; preferences: check and tokenization of lists on disk",
)
parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
arguments = parser.parse_args()
if arguments.what == "core":
    from adpo.bench import core

    core.run(core.SIZES[:2] if arguments.quick else core.SIZES)
else:
    from adpo.bench import preferences

    preferences.run(5_000 if arguments.quick else 100_000)
