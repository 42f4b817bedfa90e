"""Benchmarks: programs that print ratios measured in one run. ``python -m adpo.bench core``."""
