"""A rollout server of verl's that samples with transformers."""

import asyncio
import os

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

WAIT = 0.02  # seconds, for requests to come together
TOGETHER = 64


@ray.remote(num_cpus=0)
class Server:
    """Requests that come at the same time are sampled as one batch."""

    def __init__(self, path, longest, seed):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.longest, self.global_steps = longest, 0
        self.waiting, self.task = [], None

    async def generate(self, request_id, prompt_ids, sampling_params, **_):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), sampling_params, answer))
        if self.task is None or self.task.done():
            self.task = asyncio.ensure_future(self._serve())
        return await answer

    async def _serve(self):
        await asyncio.sleep(WAIT)
        while self.waiting:
            batch, self.waiting = self.waiting[:TOGETHER], self.waiting[TOGETHER:]
            for (_, _, answer), (tokens, logp) in zip(batch, self._sampled(batch), strict=True):
                answer.set_result(
                    TokenOutput(
                        token_ids=tokens,
                        log_probs=logp,
                        stop_reason="completed",
                        num_preempted=0,
                        extra_fields={"global_steps": self.global_steps},
                    )
                )

    @torch.no_grad()
    def _sampled(self, batch):
        config = self.model.generation_config
        width = max(len(prompt) for prompt, *_ in batch)
        blank = [width - len(prompt) for prompt, *_ in batch]
        ids = torch.tensor([[config.pad_token_id or 0] * b + p for b, (p, *_) in zip(blank, batch, strict=True)])
        mask = torch.tensor([[0] * b + [1] * (width - b) for b in blank])
        asked = batch[0][1]
        if any(one != asked for _, one, _ in batch):
            raise ValueError("requests that come together have to ask for the same sampling")
        temperature = float(asked.get("temperature", 1.0))
        found = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.longest,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=max(0, asked.get("top_k", -1)),
            top_p=float(asked.get("top_p", 1.0)),
            return_dict_in_generate=True,
            output_scores=True,
        )
        logp = torch.stack(found.scores, 1).log_softmax(-1)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        for row, sequence in enumerate(found.sequences[:, width:].tolist()):
            length = next((n + 1 for n, token in enumerate(sequence) if token in ends), len(sequence))
            yield sequence[:length], [logp[row, n, token].item() for n, token in enumerate(sequence[:length])]

    async def update_weights(self, weights, global_steps=None):
        self.model.load_state_dict(weights)
        self.global_steps = global_steps

    async def ready(self):
        return True

    async def _nothing(self, *_, **__):
        return None

    wake_up = sleep = abort_all_requests = resume_generation = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class Replica(RolloutReplica):
    async def launch_servers(self):
        name = f"hf_server_{self.replica_rank}"
        server = Server.options(name=name).remote(
            self.model_config.path,
            min(self.config.response_length, int(os.environ.get("TOKENS_OF_A_TURN", "100"))),
            1234 + self.replica_rank,
        )
        await server.ready.remote()
        self.servers, self._server_handle, self._server_address = [server], server, name


class Adapter(BaseRollout):
    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        self.replica_rank, self.leads = rank // size, rank % size == 0

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **_):
        whole = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().float().cpu().clone()
            for name, value in weights
        }
        if self.leads:
            server = ray.get_actor(f"hf_server_{self.replica_rank}")
            await server.update_weights.remote(whole, global_steps)
