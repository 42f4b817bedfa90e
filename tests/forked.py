"""Processes that begin with everything imported: forked from a server, which imports torch and TRL once.

A process that imports them itself takes ten seconds of a core before it does anything. The server has imported
them and done nothing with them: no threads, no gradients. What is forked from it runs a module, a program or a
file as `python` does. Where there is a GPU nothing is imported beforehand: a device cannot be used after a fork.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

MODULES = ("tensorboard", "peft", "trl", "adpo.trainers.trl", "adpo.trainers.listwise")
MODULES = (*MODULES, "adpo.runs.train_eval", "adpo.runs.prefer", "pytest")


class Process:
    """`python words...`, as `subprocess.Popen` would start it, in a session of its own."""

    def __init__(self, *words, env=None):
        self.args = [str(word) for word in words]
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("output", "errors")]
        given = {
            "words": self.args,
            "folder": str(Path.cwd()),
            "path": sys.path,
            "files": list(map(str, self._files)),
        }
        self.pid = _ask({**given, "environment": {**os.environ, **(env or {})}})
        self.returncode = None

    @property
    def output(self):
        return self._files[0].read_text()

    @property
    def errors(self):
        return self._files[1].read_text()

    def poll(self):
        if self.returncode is None:
            self.returncode = _ask(self.pid)
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self, timeout=300):
        """The exit code; what has not ended by then is killed."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout, self.output, self.errors)
            time.sleep(0.02)
        return self.returncode

    def kill(self):
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def run(*words, timeout=300, env=None):
    """`python words...`, as `subprocess.run` runs it: exit code, output and errors."""
    process = Process(*words, env=env)
    code = process.wait(timeout)
    return subprocess.CompletedProcess(process.args, code, process.output, process.errors)


def run_two(*words, timeout=600):
    """`python words...` as two processes of one training, as a launcher starts them: what both wrote."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    both = [Process(*words, env={**env, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    end = time.monotonic() + timeout
    while None in (codes := [process.poll() for process in both]) and time.monotonic() < end:
        if any(codes):  # the other one would wait for it; a moment for its own complaint
            end = min(end, time.monotonic() + 2)
        time.sleep(0.02)
    for process in both:
        if process.poll() is None:
            process.kill()
    code = next((process.returncode for process in both if process.returncode), 0)
    written = ("".join(texts) for texts in zip(*((each.output, each.errors) for each in both), strict=True))
    return subprocess.CompletedProcess(both[0].args, code, *written)


@functools.cache
def _server():
    env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # else to look for a GPU is to use it
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, __file__], **pipes, text=True, bufsize=1, env=env)
    atexit.register(server.communicate)  # which closes its input: it ends
    return server


def _ask(request):
    server = _server()
    server.stdin.write(json.dumps(request) + "\n")
    return json.loads(server.stdout.readline())


def serve():
    """Answers requests: what to start (the process id), or a process id (its exit code or None).

    Returns in what is forked, with what is to be started there.
    """
    import torch

    for module in () if torch.cuda.is_available() else MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # what is there already is not looked through in every process
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if answer == 0:
                return request
        os.write(1, (json.dumps(answer) + "\n").encode())
    os._exit(0)


def begin(words, path, folder, files, environment):
    """What `python words...` does."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    handles = [os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for file in files]
    for number, handle in enumerate([null, *handles]):
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    option, *rest = words
    sys.argv = rest if option == "-m" else words
    sys.path[:] = path
    if option == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(option).parent))
        runpy.run_path(option, run_name="__main__")


def end(code):
    """As the interpreter ends, without taking all modules apart, which takes seconds."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    request = serve()
    try:
        begin(**request)
    except SystemExit as ending:
        end(ending.code)
    except BaseException:
        traceback.print_exc()
        end(1)
    end(None)
