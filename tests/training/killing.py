"""Runs a command again and again, each time killed with SIGKILL at a random moment, until it has ended.

    python killing.py SEED KILLS LONGEST LOG -- train --out DIR ... --resume

At most KILLS times, the next process is left alone. A process is killed within LONGEST seconds; or, where that is
0, a moment after it has written one more checkpoint or a few. Everything is imported once; every attempt is a
process of its own. Prints the number of kills as JSON.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

MODULES = ("adpo.runs.train_eval", "adpo.runs.prefer", "adpo.trainers.trl", "tensorboard", "peft")


def attempt(words, log):
    """The process id of a child that carries out the command."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 99
    try:
        from adpo.cli import main

        sys.argv = ["adpo", *words]
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def steps(out):
    return max([int(path.name.split("-")[1]) for path in out.glob("checkpoint-*")], default=0)


def moment(draw, longest, out):
    """A function that says when to kill."""
    began = time.monotonic()
    if longest:
        seconds = draw.uniform(0, longest)
        return lambda: time.monotonic() - began > seconds
    wanted, pause = steps(out) + draw.randint(1, 4), draw.uniform(0, 0.2)

    def due():
        if steps(out) < wanted:
            return False
        time.sleep(pause)
        return True

    return due


def main():
    seed, most, longest, log = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])
    words = sys.argv[sys.argv.index("--") + 1 :]
    out = Path(words[words.index("--out") + 1])
    for module in MODULES:
        importlib.import_module(module)
    draw, kills = random.Random(seed), 0
    while True:
        child = attempt(words, log)
        due = moment(draw, longest, out) if kills < most else bool
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                sys.stdout.write(json.dumps({"kills": kills, "code": os.waitstatus_to_exitcode(status)}))
                return
            if due():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
                break
            time.sleep(0.003)


if __name__ == "__main__":
    main()
