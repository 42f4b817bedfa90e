"""vLLM as the sampler: what is refused at the start, and what is read from a server's responses."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest
import tiny_lm
import torch

from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer
from adpo.trainers.trl.rollout import vllm as needs
from adpo.trainers.trl.rollout.endings import Completion, Endings

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
STARTED = {
    "weight_transfer_config": {"backend": "nccl"},
    "model_config": {"model": "served", "max_model_len": 300, "logprobs_mode": "processed_logprobs"},
}


class Answers(BaseHTTPRequestHandler):
    """A server that was started well; `change` is what differs, by path: a status or an answer."""

    change: ClassVar[dict] = {}

    def do_GET(self):
        path = self.path.partition("?")[0]
        found = {"/health": None, "/server_info": {"vllm_config": STARTED}} | self.change
        self.answer(found.get(path, 404))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = tiny_lm.tokenizer()(body["prompt"], add_special_tokens=False)["input_ids"]
        self.answer(self.change.get(self.path, {"tokens": tokens}))

    def answer(self, found):
        status, content = (found, None) if isinstance(found, int) else (200, found)
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """A server with changed answers; its address."""
    servers = []

    def start(**change):
        handler = type("Changed", (Answers,), {"change": change.get("change", {})})
        server = HTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def config(folder, url, kind=ADPOConfig, **more):
    more = {"vllm_server_timeout": 0.0, "max_completion_length": 256, **more}
    return kind(str(folder), **CPU, vllm_mode="server", vllm_server_base_url=url, **more)


def started(**more):
    return {"/server_info": {"vllm_config": {**STARTED, **more}}}


def model_config(**more):
    return started(model_config={**STARTED["model_config"], **more})


def test_a_server_that_was_started_well(serve, tmp_path):
    """With a slash behind its address, on which TRL would wait for ever."""
    url = serve()
    args = config(tmp_path, url + "/")
    needs.check_server(args)
    assert args.vllm_server_base_url == url
    needs.check_tokenizer(args, tiny_lm.tokenizer())


@pytest.mark.parametrize(
    ("change", "more", "complaint"),
    [
        ({"/server_info": 404}, {}, "takes no weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment"),
        ({"/server_info": 500}, {}, r"\(/server_info answers 500\): see its log; it needs pip in its environment"),
        (started(weight_transfer_config=None), {}, "takes no weights: start it with --weight-transfer-config '{"),
        (model_config(max_model_len=256), {}, "room for 256 tokens of prompt and completion, max_completion_l"),
        ({"/health": 503}, {}, "answers 503 at /health, after 0 seconds: start it first"),
        ({"/health": 404}, {"vllm_server_timeout": 0.2}, "answers 404 at /health, after 0.2 seconds"),
        (
            model_config(logprobs_mode="raw_logprobs"),
            {"kind": FastGRPOConfig, "temperature": 0.7},
            "returns raw_logprobs, with which vllm_importance_sampling_correction would be wrong",
        ),
    ],
)
def test_a_server_that_was_started_otherwise(serve, tmp_path, change, more, complaint):
    url = serve(change=change)
    with pytest.raises(ValueError, match=f"^the vLLM server at {url} .*{complaint}"):
        needs.check_server(config(tmp_path, url, **more))


def test_log_probabilities_that_nobody_shaped(serve, tmp_path):
    url = serve(change=model_config(logprobs_mode="raw_logprobs"))
    needs.check_server(config(tmp_path, url, kind=FastGRPOConfig))
    needs.check_server(config(tmp_path, url, temperature=0.7))  # ADPO takes no ratio to the sampler's


def test_a_server_that_is_not_there(tmp_path):
    args = config(tmp_path, "http://127.0.0.1:9", vllm_server_timeout=0.1)
    with pytest.raises(ValueError, match=r"^the vLLM server at http://127.0.0.1:9 cannot be reached, after 0.1"):
        needs.check_server(args)
    with pytest.raises(ValueError, match=r"must begin with http:// or https://; got 'localhost:8000'$"):
        needs.check_server(config(tmp_path, "localhost:8000"))
    plain = ADPOConfig(str(tmp_path), **CPU, vllm_mode="server", vllm_server_host="there", vllm_server_port=81)
    assert needs.server_url(plain) == "http://there:81"


def test_a_server_that_comes_up_while_waiting(serve, tmp_path, monkeypatch):
    states = iter([(0, None), (503, None)])
    plain = needs._asked
    monkeypatch.setattr(needs, "_asked", lambda *a: next(states, None) or plain(*a))
    monkeypatch.setattr(needs, "PAUSE", 0.01)
    needs.check_server(config(tmp_path, serve(), vllm_server_timeout=60.0))
    assert next(states, None) is None


def test_another_tokenizer(serve, tmp_path):
    args = config(tmp_path, serve(change={"/tokenize": {"tokens": [1, 2, 3]}}))
    with pytest.raises(ValueError, match="another tokenizer than the model that is trained: start it"):
        needs.check_tokenizer(args, tiny_lm.tokenizer())
    needs.check_tokenizer(config(tmp_path, serve(change={"/tokenize": 404})), tiny_lm.tokenizer())  # it has none


def test_the_room_of_a_server(serve, tmp_path):
    models = {"/v1/models": {"data": [{"id": "served", "max_model_len": 300}]}}
    assert needs.server_room(config(tmp_path, serve(change=models))) == 300
    assert needs.server_room(config(tmp_path, serve())) is None
    assert needs.server_room(ADPOConfig(str(tmp_path), **CPU)) is None


@pytest.mark.parametrize("kind", [ADPOTrainer, FastGRPOTrainer])
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_packed_weights_are_refused_before_an_engine_is_started(tmp_path, kind, mode):
    model = tiny_lm.model()
    needs.refuse_packed(model.to(torch.bfloat16))
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    form = ADPOConfig if kind is ADPOTrainer else FastGRPOConfig
    with pytest.raises(ValueError, match=r"^use_vllm needs weights .* packed \(torch.uint8\): leave"):
        kind(
            model, lambda **_: [], form(str(tmp_path), **CPU, vllm_mode=mode), processing_class=tiny_lm.tokenizer()
        )


def test_other_processes_leave_the_server_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "refuse_without_gpu", lambda _: None)
    args = config(tmp_path, "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="cannot be reached"):
        needs.check_vllm(args)
    monkeypatch.setattr(ADPOConfig, "process_index", 1)
    needs.check_vllm(args)
    needs.check_tokenizer(args, tiny_lm.tokenizer())


@pytest.mark.parametrize("mode", ["colocate", "server"])
@pytest.mark.parametrize("device", ["cpu", "xpu", "cuda"])
def test_where_vllm_takes_weights(device, mode):
    args = SimpleNamespace(device=torch.device(device), vllm_mode=mode)
    if device == "cuda" or (device, mode) == ("xpu", "colocate"):
        needs.refuse_without_gpu(args)
        return
    with pytest.raises(ValueError, match=f"^use_vllm needs a GPU .* this run is on {device}: leave use_vllm out"):
        needs.refuse_without_gpu(args)


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig])
@pytest.mark.parametrize(
    ("mode", "name", "value", "complaint"),
    [
        ("server", "vllm_enable_sleep_mode", True, "where vLLM is started with it: leave it out"),
        ("server", "vllm_max_model_length", 99, "where vLLM is started with it"),
        ("colocate", "vllm_server_base_url", "http://there", "which has no server: leave it out"),
    ],
)
def test_settings_of_the_other_mode_are_refused(tmp_path, kind, mode, name, value, complaint):
    with pytest.raises(ValueError, match=f"^{name} = .* has no effect with vllm_mode {mode}, {complaint}"):
        kind(str(tmp_path), **CPU, vllm_mode=mode, **{name: value})


@pytest.mark.parametrize("kind", [ADPOConfig, FastGRPOConfig])
def test_a_mode_that_there_is_not(tmp_path, kind):
    with pytest.raises(ValueError, match=r"^vllm_mode must be one of server, colocate; got 'remote'"):
        kind(str(tmp_path), **CPU, vllm_mode="remote")


# What a server answers.


def response(url, *choices, status=200):
    found = [dict(zip(("prompt_token_ids", "token_ids", "finish_reason"), row, strict=True)) for row in choices]
    return SimpleNamespace(status_code=status, url=url, json=lambda: {"choices": found})


def test_finish_reasons_of_a_server():
    """Cut below the limit (the context was full), whole at the limit (a stop word), whole with no end."""
    hooks = {"response": []}
    recorded = needs.RecordedServer(SimpleNamespace(session=SimpleNamespace(hooks=hooks)))
    rows = [([5, 0], [7, 8], "length"), ([5, 1], [7, 8, 9], "stop"), ([5, 2], [7], "stop")]
    (read,) = hooks["response"]
    read(response("http://there/v1/completions", *rows), timeout=3)
    read(response("http://there/update_weights", status=200))
    read(response("http://there/v1/completions", ([5, 3], [7], "stop"), status=400))
    recorded.share()
    endings = Endings(ends={1}, limit=3, reasons=recorded.reasons)
    assert [endings.is_cut(Completion(*row[:2])) for row in rows] == [True, False, False]
    assert len(recorded.reasons) == 3


def test_end_tokens_end_completions():
    assert needs.with_ends(None, [3, 1]) == {"stop_token_ids": [1, 3]}
    given = {"stop_token_ids": [7, 3], "seed": 1}
    assert needs.with_ends(given, [3]) == {"stop_token_ids": [3, 7], "seed": 1}
    assert given == {"stop_token_ids": [7, 3], "seed": 1}
    assert needs.with_ends({"ignore_eos": True}, [3]) == {"ignore_eos": True}


AGAIN = "see its log, and start it again with the model that is trained"


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (Exception("Request failed: 500, too\nlong"), AGAIN),
        (ConnectionResetError("too\nlong"), AGAIN),
        (Exception("Request failed: 400, context length\ntoo\nlong"), "start it with a larger --max-model-len"),
    ],
)
def test_a_server_that_fails_is_one_line(tmp_path, error, then):
    args = config(tmp_path, "http://there")
    expected = rf"^the vLLM server at http://there failed \(.*too long\): {then}$"
    with pytest.raises(ValueError, match=expected), needs.failures_in_one_line(args):
        raise error
    colocate = ADPOConfig(str(tmp_path), **CPU)
    for given, other in ((args, ZeroDivisionError()), (colocate, error)):
        with pytest.raises(type(other)) as raised, needs.failures_in_one_line(given):
            raise other
        assert raised.value is other
