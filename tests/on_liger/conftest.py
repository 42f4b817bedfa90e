"""These tests need triton and Liger, put beside the environment's packages (`make test-liger`)."""

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("triton") and importlib.util.find_spec("liger_kernel") else ["test_*.py"]
)
