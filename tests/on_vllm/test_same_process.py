"""Training with vLLM in the same process, on a CPU; what differs from a GPU is in `same_process.py`."""

import json
import subprocess
import sys

import pytest
import same_process
import serving
from rollouts import check


def run(name, folder, model):
    done = subprocess.run(
        [sys.executable, str(serving.HERE / "same_process.py"), name, str(folder), str(model)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=serving.environment(folder),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", same_process.RUNS)
def test_runs_that_learn(tmp_path, model, name):
    """Weights have arrived before every rollout, also where vLLM has slept since."""
    found = run(name, tmp_path, model)
    check(found)
    assert found["slept"] == [2] * (4 if "sleeping" in name else 0)  # when it is made, and after each rollout
    if name == "adpo":
        assert {tokens[-1] for rows in found["rollouts"] for tokens, cut, *_ in rows if not cut} & {2, 3}


@pytest.mark.parametrize("name", same_process.COMMANDS)
def test_the_command(tmp_path, model, name):
    found = run(name, tmp_path, model)
    assert (found["steps"], found["nothing_learnt"]) == (2, None)
    assert "vLLM" in found["sampling"]
    assert found["slept"] == [2] * (3 if "sleeping" in name else 0)
