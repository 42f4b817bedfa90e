"""Weights through a folder that trainer and server share, in the place of NCCL, which needs GPUs.

The server loads this as a plugin of vLLM (`register`); the trainer's side is `instead_of_nccl`. Requests, the
order of messages, names and loading are those of TRL and of vLLM.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

NAME = "files"
FOLDER = "ADPO_TEST_WEIGHTS"
PATIENCE = 120  # seconds


@dataclass
class Start:
    """What TRL sends to begin with; none of it is needed here."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool


@dataclass
class Announced:
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


def register():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    class Files(WeightTransferEngine):
        init_info_cls, update_info_cls = Start, Announced

        def init_transfer_engine(self, init_info):
            pass

        def start_weight_update(self):
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def finish_weight_update(self):
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info):
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info):
            file, until = sent(), time.monotonic() + PATIENCE
            while not file.exists():
                if time.monotonic() > until:
                    raise TimeoutError("no weights came")
                time.sleep(0.01)
            weights = torch.load(file)
            file.unlink()
            expected = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            for (name, tensor), announced in zip(weights, expected, strict=True):
                assert (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) == announced
            self.model.load_weights(weights)

        def shutdown(self):
            pass

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Files)


def sent():
    return Path(os.environ[FOLDER]) / "weights"


def broadcast(iterator, group, src, post_iter_func):
    weights = [(item[0], post_iter_func(item).detach().clone()) for item in iterator]
    file = sent()
    assert not file.exists(), "the server has not read the last ones"
    torch.save(weights, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def instead_of_nccl(changes):
    """In the trainer's process; ``changes`` is pytest's monkeypatch, or its like."""
    from trl.generation import vllm_client

    client, plain = vllm_client.VLLMClient, vllm_client.VLLMClient.init_communicator
    changes.setattr(client, "init_communicator", lambda self, device=0: plain(self, "cuda"))
    changes.setattr(client, "close_communicator", lambda self: None)
    changes.setattr(vllm_client, "open_trainer_endpoint", lambda init_info: NAME)
    changes.setattr(vllm_client, "packed_nccl_broadcast_producer", broadcast)
