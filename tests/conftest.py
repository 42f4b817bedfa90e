"""Settings shared by all tests."""

import gc
import os

import torch
from hypothesis import settings

# The tables are tiny, and the tests run on several processes: threads that wait for each other would only spin.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start
os.environ["HF_HUB_OFFLINE"] = "1"  # a hub that is not there is asked for most of a minute
settings.register_profile("adpo", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("mutate", deadline=None, max_examples=8, derandomize=True, database=None)
settings.load_profile("adpo")


def pytest_collection_finish():
    """Garbage is looked for among what tests make, not among the modules that are there for all of them."""
    gc.collect()
    gc.freeze()
