"""``python -m adpo.bench core [--quick]``."""

import argparse

from adpo.bench import core

parser = argparse.ArgumentParser(prog="python -m adpo.bench", description="Time and memory, as ratios in one run.")
parser.add_argument("what", choices=["core"], help="core: loss and gradient of every target")
parser.add_argument("--quick", action="store_true", help="the two smallest sizes only")
arguments = parser.parse_args()
core.run(core.SIZES[:2] if arguments.quick else core.SIZES)
