"""These tests have an environment of their own (`make test-verl`)."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]
