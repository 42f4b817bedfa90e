"""vLLM as the sampler: what must be there before a run begins, and how completions of a server end.

A server is asked for what it was started with before anything is loaded. TRL drops the reasons why its completions
ended; they are read from the responses.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import nn

from adpo.trainers.trl.rollout.endings import Key

log = logging.getLogger("adpo")
COMPLETIONS = "/v1/completions"
PACKED = (
    "use_vllm needs weights in a floating-point type; this model's are packed ({}): leave use_vllm out, or the "
    "quantisation"
)
SAMPLE = "Is 7 - 3 * 10.5 = -24.5? Überprüfe: (x + 1)^2\n\t数学 <b>"
"""A text that two tokenizers hardly cut alike."""
PAUSE = 2.0
"""Seconds between two attempts to reach a server."""
ATTEMPT = 10.0
"""Seconds in which a server that is there answers."""


def check_vllm(args: Any, model: Any = None) -> None:
    """Before anything is started; ``args`` are the trainer's, ``model`` may be a name still."""
    if not args.use_vllm:
        return
    if isinstance(model, nn.Module):
        refuse_packed(model)
    refuse_without_gpu(args)
    if args.vllm_mode == "server" and args.process_index == 0:  # TRL speaks to it from there alone
        check_server(args)


def refuse_without_gpu(args: Any) -> None:
    """On a CPU vLLM samples, but takes no new weights: TRL would fail in the first rollout."""
    device = args.device.type
    if device == "cpu" or (args.vllm_mode == "server" and device != "cuda"):
        raise ValueError(
            f"use_vllm needs a GPU to hand the weights of every step to vLLM; this run is on {device}: leave "
            "use_vllm out (transformers then sample)"
        )


def server_url(args: Any) -> str:
    """As TRL puts it together."""
    given = args.vllm_server_base_url
    if given is None:
        return f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    if not given.startswith(("http://", "https://")):
        raise ValueError(f"vllm_server_base_url must begin with http:// or https://; got {given!r}")
    return str(given).rstrip("/")


def check_server(args: Any) -> None:
    """Wait for it as long as TRL would, and look at what it was started with."""
    url = server_url(args)
    if args.vllm_server_base_url is not None:
        args.vllm_server_base_url = url  # TRL waits for ever where it ends with a slash
    _wait(url, args.vllm_server_timeout)
    status, found = _asked(f"{url}/server_info?config_format=json")
    if status == 404:
        raise ValueError(
            f"the vLLM server at {url} takes no weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        )
    if status != 200:
        raise ValueError(
            f"the vLLM server at {url} does not say how it was started (/server_info answers {status}): see its "
            "log; it needs pip in its environment"
        )
    config = found["vllm_config"]
    if config["weight_transfer_config"] is None:
        raise ValueError(
            f"the vLLM server at {url} takes no weights: start it with "
            """--weight-transfer-config '{"backend": "nccl"}'"""
        )
    model = config["model_config"]
    if model["max_model_len"] <= args.max_completion_length:
        raise ValueError(
            f"the vLLM server at {url} has room for {model['max_model_len']} tokens of prompt and completion, "
            f"max_completion_length is {args.max_completion_length}: start it with a larger --max-model-len"
        )
    shaped = args.temperature != 1 or args.top_p != 1 or args.top_k or args.min_p or args.repetition_penalty != 1
    if args.vllm_importance_sampling_correction and shaped and model["logprobs_mode"] != "processed_logprobs":
        raise ValueError(
            f"the vLLM server at {url} returns {model['logprobs_mode']}, with which "
            "vllm_importance_sampling_correction would be wrong: start it with --logprobs-mode processed_logprobs"
        )
    log.info("vLLM samples at %s, with the weights of this run in the place of those of %s", url, model["model"])


def check_tokenizer(args: Any, tokenizer: Any) -> None:
    """The server's, by a text: another model there would take other weights."""
    if not args.use_vllm or args.vllm_mode != "server" or args.process_index != 0:
        return
    url = server_url(args)
    status, found = _asked(f"{url}/tokenize", {"prompt": SAMPLE, "add_special_tokens": False})
    mine = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    if status == 200 and found["tokens"] != mine:
        raise ValueError(
            f"the vLLM server at {url} has another tokenizer than the model that is trained: start it with that "
            "model"
        )


def refuse_packed(model: nn.Module) -> None:
    """TRL would send a server packed parameters without their scales.

    In the same process it merges an adapter into them, and back, before every rollout, each time with a rounding.
    """
    packed = next((value.dtype for value in model.parameters() if not value.is_floating_point()), None)
    if packed is not None:
        raise ValueError(PACKED.format(packed))


def server_room(args: Any) -> int | None:
    """Tokens that prompt and completion may have at a server; None where there is none, or it does not say."""
    if not args.use_vllm or args.vllm_mode != "server":
        return None
    status, found = _asked(f"{server_url(args)}/v1/models")
    return found["data"][0].get("max_model_len") if status == 200 else None


def _wait(url: str, patience: float) -> None:
    until = time.monotonic() + patience
    status, announced = _asked(f"{url}/health")[0], False
    while status != 200:
        if time.monotonic() >= until:
            what = f"answers {status} at /health" if status else "cannot be reached"
            raise ValueError(
                f"the vLLM server at {url} {what}, after {patience:g} seconds: start it first (vllm serve), or "
                "raise vllm_server_timeout"
            )
        if not announced:
            log.warning("waiting for the vLLM server at %s, %g seconds at most", url, patience)
            announced = True
        time.sleep(min(PAUSE, max(until - time.monotonic(), 0.0)))
        status = _asked(f"{url}/health")[0]


def _asked(url: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Status, 0 where nobody answers, and what came as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ATTEMPT) as response:
            content = response.read()
            return int(response.status), json.loads(content) if content else None
    except urllib.error.HTTPError as error:
        return error.code, None
    except (OSError, ValueError):  # nobody there, or somebody who speaks another language
        return 0, None


class RecordedServer:
    """The finish reason of every completion of a rollout, by its prompt and tokens, from a server's responses."""

    def __init__(self, client: Any = None) -> None:
        self.reasons: dict[Key, str | None] = {}
        if client is not None:  # on the main process
            client.session.hooks["response"].append(self._read)

    def _read(self, response: Any, *_: Any, **__: Any) -> None:
        if response.status_code == 200 and response.url.endswith(COMPLETIONS):
            for found in response.json()["choices"]:
                key = (tuple(found["prompt_token_ids"]), tuple(found["token_ids"]))
                self.reasons[key] = found["finish_reason"]

    def share(self) -> None:
        """With the processes that do not speak to the server."""
        (self.reasons,) = broadcast_object_list([self.reasons])


def with_ends(generation_kwargs: Mapping[str, Any] | None, ends: Collection[int]) -> dict[str, Any]:
    """End tokens of the trainer end completions, whatever model vLLM was started with.

    >>> with_ends({"stop_token_ids": [7]}, [2, 1])
    {'stop_token_ids': [1, 2, 7]}
    """
    given = dict(generation_kwargs or {})
    if given.get("ignore_eos"):
        return given
    return {**given, "stop_token_ids": sorted({*(given.get("stop_token_ids") or ()), *ends})}


@contextmanager
def failures_in_one_line(args: Any) -> Iterator[None]:
    """What a server does not answer, or answers with an error."""
    try:
        yield
    except Exception as error:
        failed = isinstance(error, OSError) or str(error).startswith("Request failed")
        if not (args.use_vllm and args.vllm_mode == "server" and failed):
            raise
        line = " ".join(str(error).split())[:300]
        then = "see its log, and start it again with the model that is trained"
        if "context length" in line:
            then = "start it with a larger --max-model-len"
        raise ValueError(f"the vLLM server at {server_url(args)} failed ({line}): {then}") from error
