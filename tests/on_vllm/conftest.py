"""These tests need vLLM, built for CPUs: an environment of their own (`make test-vllm`)."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if importlib.util.find_spec("vllm"):
    collect_ignore_glob = []
    sys.path[:0] = [str(HERE.parent / name) for name in ("", "integrations", "parity", "support")]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder."""
    from test_vllm_cuda import model

    folder = tmp_path_factory.mktemp("model")
    model(folder)
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory, model):
    """As `trl vllm-serve` starts it; this process sends it weights through a folder."""
    import file_transport
    import serving

    import adpo.trainers.trl.rollout.vllm as needs

    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("HF_HUB_OFFLINE", "1")
        changes.setenv(file_transport.FOLDER, str(folder))
        changes.setattr(needs, "refuse_without_gpu", lambda _: None)
        file_transport.instead_of_nccl(changes)
        with serving.started(folder, model) as found:
            yield found
