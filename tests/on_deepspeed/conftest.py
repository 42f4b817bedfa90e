"""These tests need DeepSpeed, which is built for them (`make test-deepspeed`)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]
