"""What a process of verl's needs to know to run on CPUs here."""

import os
from pathlib import Path

import adpo


def environment(**more):
    """Ours, with the platform for CPUs of these tests; adpo comes by its entry point."""
    paths = (Path(__file__).parent, Path(adpo.__file__).parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }
