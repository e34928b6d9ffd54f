"""Servers that answer in another form than their API's, about another model, or without end: one line, status 2."""

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.clients.one_request import NoReply, request
from atroposlib.clients.one_request import Reply as OneReply
from sampler_doctor.__main__ import main
from sampler_doctor.servers.generate import Generate
from sampler_doctor.servers.sampler import AFTER_SILENCE_S, Broken
from tests.serving import Asked, Reply, ThreadedServer
from tests.unit.sampler_doctor.tiny import save_model

CARDS = {"data": [{"id": "m", "max_model_len": 384}]}
LOGPROBS = {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": -1.0}]}
FORM, OTHER = "does not answer in the form of its API", "name what is served"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", 0)


def choice(**changed: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": [5], "finish_reason": "length", "logprobs": LOGPROBS, **changed}]}


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        ({"/v1/models": "<html>"}, FORM),
        ({"/v1/models": None}, FORM),
        ({"/v1/models": {"data": []}}, FORM),
        ({"/v1/models": {"data": [{"id": "m", "max_model_len": "long"}]}}, FORM),
        ({"/v1/completions": "<html>"}, FORM),
        ({"/v1/completions": {}}, FORM),
        ({"/v1/completions": {"choices": []}}, FORM),
        ({"/v1/completions": {"choices": 2 * choice()["choices"]}}, "2 answers where 1 was asked for"),
        ({"/v1/completions": choice(logprobs="x")}, FORM),
        ({"/v1/completions": choice(logprobs={**LOGPROBS, "token_logprobs": ["x"]})}, FORM),
        ({"/v1/completions": choice(logprobs={**LOGPROBS, "top_logprobs": [{"token_id:5": "x"}]})}, FORM),
        ({"/v1/completions": choice(token_ids=[5, 6, 7])}, FORM),
        ({"/v1/completions": choice(token_ids=["x"])}, FORM),
        ({"/v1/completions": choice(token_ids=[10**9])}, OTHER),
        ({"/v1/completions": choice(token_ids=[-7])}, OTHER),
        ({"/v1/completions": choice(logprobs=None)}, "the answer has no logprobs"),
        ({"/model_info": {}, "/generate": {"meta_info": "x"}}, FORM),
        ({"/model_info": {}, "/generate": {"meta_info": {"output_token_logprobs": []}}}, "gives no log-probabilities"),
        (
            {
                "/model_info": {},
                "/generate": {"meta_info": {"output_token_logprobs": [[-1.0, 5, None]], "output_top_logprobs": [[]]}},
            },
            "gives no log-probabilities",
        ),
    ],
)
def test_a_reply_in_another_form_ends_in_one_line(
    replies: Mapping[str, Any], told: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"/v1/models": CARDS, "/v1/completions": choice(), **replies}

    def answer(asked: Asked) -> Reply:
        if asked.path not in known:
            return Reply(404)
        return Reply(200, json.dumps(known[asked.path]).encode())

    with ThreadedServer(answer) as server, pytest.raises(SystemExit) as ended:
        main(["--sampler", server.url, "--model", str(model), "--receipt", str(tmp_path / "r.json")])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_a_server_that_is_silent_once_is_waited_for_a_shorter_time_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that twenty rows of a server that hangs do not take twenty times the limit."""
    waited, silent = list[float](), iter([True, True, False, False])

    def answered(*_: str, read_s: float, **__: object) -> OneReply:
        waited.append(read_s)
        if next(silent):
            raise NoReply("ReadTimeout", timed_out=True)
        return OneReply(200, httpx.Headers(), b"{}")

    monkeypatch.setattr("sampler_doctor.servers.sampler.request", answered)
    sampler = Generate("http://127.0.0.1:9", None, 120.0, 10)
    for is_silent in (True, True, False, False):
        with pytest.raises(Broken, match="limit") if is_silent else contextlib.nullcontext():
            sampler.get("/")
    assert waited == [120.0, AFTER_SILENCE_S, AFTER_SILENCE_S, 120.0]


def test_a_reply_without_end_ends_at_its_limit() -> None:
    over = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            while not over.wait(0.02):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(NoReply, match="does not end"):
            request("GET", url, connect_s=0.1, read_s=30, whole_s=0.2)
        over.set()
        thread.join(30)
