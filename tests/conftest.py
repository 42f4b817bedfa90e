"""Settings shared by all tests."""

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the tables are tiny, and the tests run on several processes
settings.register_profile("adpo", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("mutate", deadline=None, max_examples=8, derandomize=True, database=None)
settings.load_profile("adpo")
