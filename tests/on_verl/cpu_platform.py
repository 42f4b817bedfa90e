"""verl on CPUs, for tests: a platform, and a server that samples with transformers.

Loaded by ``VERL_USE_EXTERNAL_MODULES=cpu_platform`` with ``VERL_PLATFORM=cpu`` and ``VERL_ENGINE_DEVICE=cuda``
(the engines are registered for accelerators alone).
"""

import types
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import verl.workers  # noqa: F401  what is registered below has to be there
from torch.distributed.fsdp import CPUOffloadPolicy, _init_utils, sharded_grad_scaler
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry


class _Module(types.ModuleType):
    """Where torch.cuda would be: what a CPU has no word for is nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_, **__: 0)


device_module = _Module("device_of_verl")
device_module.is_available = lambda: True
device_module.current_device = lambda: "cpu"
device_module.set_device = lambda *_: None
device_module.get_device_name = lambda *_: "cpu"
device_module.mem_get_info = lambda *_: (1 << 33, 1 << 34)
device_module.synchronize = lambda *_: None
device_module.get_rng_state = lambda *_: torch.get_rng_state()
device_module.set_rng_state = lambda state, *_: torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, index):
        pass

    def synchronize(self, index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, index=0):
        return (None, None)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, message):
        return nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "NPU"  # verl counts the resources of accelerators it knows

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


def _replica():
    from hf_rollout import Replica

    return Replica


base._ROLLOUT_REGISTRY[("hf", "async")] = "hf_rollout.Adapter"
RolloutReplicaRegistry.register("hf", _replica)

# The first FSDP wants a module on an accelerator before it sends its parameters to the other ranks.
_init_utils._check_module_states_for_sync_module_states = lambda _: None
# Losses in fp16 are scaled here as they are there, from a scale on that needs no steps to be found.
sharded_grad_scaler.ShardedGradScaler = partial(
    sharded_grad_scaler.ShardedGradScaler, device="cpu", init_scale=256.0
)

from verl.workers.engine.fsdp import transformer_impl  # noqa: E402  it asks for the platform

# A reference's parameters wait on the host, in pages that only an accelerator can pin.
transformer_impl.CPUOffloadPolicy = lambda pin_memory=True: CPUOffloadPolicy(pin_memory=False)

_init = dist.init_process_group


def init_process_group(backend=None, *arguments, **options):
    """verl asks for gloo on the CPU and for a backend on the device, which is the CPU again."""
    return _init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *arguments, **options)


dist.init_process_group = init_process_group
