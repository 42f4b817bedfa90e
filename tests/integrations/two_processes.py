"""A test file run as two processes of one training."""

import os
import subprocess
import sys
from pathlib import Path


def run(file, folder, *words):
    """The file's own worker, on that folder and with these words, twice; what both said."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [*launcher, str(file), str(folder), *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
