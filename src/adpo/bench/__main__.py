"""``python -m adpo.bench core [--quick]``, or ``bandits``, ``head``, ``preferences``, ``reasoning``."""

import argparse

parser = argparse.ArgumentParser(prog="python -m adpo.bench", description="Time and memory, as ratios in one run.")
parser.add_argument(
    "what",
    choices=["core", "bandits", "head", "preferences", "reasoning"],
    help="core: loss and gradient of every target; bandits: training of many policies as one; "
    "head: the output layer, by everyone's kernel; "
    "preferences: check and tokenization of lists on disk; reasoning: a trial of its paper preset, random weights",
)
parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
arguments = parser.parse_args()
if arguments.what == "core":
    from adpo.bench import core

    core.run(core.SIZES[:2] if arguments.quick else core.SIZES)
elif arguments.what == "bandits":
    from adpo.bench import bandits

    bandits.run(*((2, range(2)) if arguments.quick else (20, range(12))))
elif arguments.what == "head":
    from adpo.bench import head

    head.run(head.SMALL if arguments.quick else head.LARGE)
elif arguments.what == "reasoning":
    from adpo.bench import reasoning

    reasoning.run(arguments.quick)
else:
    from adpo.bench import preferences

    preferences.run(5_000 if arguments.quick else 100_000)
