"""Takes steps in a mount namespace of its own, where file systems can be mounted.

    python mounted.py '["mount -t tmpfs ...", ["prefer", ...], ...]'

A step is a shell command, or the words of a command of adpo: a process of its own, whose exit code is printed.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

NEW_MOUNTS, NEW_USERS = 0x00020000, 0x10000000


def own_mounts():
    """This process and its children see mounts of their own, and may mount."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS | NEW_USERS):
        raise OSError(ctypes.get_errno(), "no namespaces here")
    for name, text in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def command(words):
    """The exit code of `adpo words...`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 99
    try:
        from adpo.cli import main

        sys.argv = ["adpo", *words]
        main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def main():
    own_mounts()
    for step in json.loads(sys.argv[1]):
        if isinstance(step, str):
            subprocess.run(["sh", "-c", step], check=True)
        else:
            sys.stdout.write(f"code {command(step)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
