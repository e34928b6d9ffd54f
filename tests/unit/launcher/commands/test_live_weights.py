"""`atropos doctor --live`: what a running server computes with is compared with files; one missed element is found."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from atropos_launcher.commands import doctor
from atroposlib.flags import ConfigError
from atroposlib.wire.bridge import LiveWeights, ServerStatus, write_policy_version
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.check_served_weights import address, finding
from tests.serving import Reply, ThreadedServer
from tests.unit.vllm_patching.engine_with_workers import EngineWithWorkers
from tests.unit.vllm_patching.memory.test_arena import expected, manifest, new_weights

COUNT = len(manifest().tensors)


@dataclass
class Server:
    """The three routes of a vLLM server of two ranks, with real workers behind them."""

    engine: EngineWithWorkers
    url: str = ""
    version: int = 3

    def answer(self, path: str) -> object:
        if path == "/v1/bridge/status":
            return ServerStatus("m", self.version, enabled=True, tp_size=2)
        if path == "/v1/bridge/manifest":
            return manifest()
        assert path == "/v1/bridge/digest"
        return LiveWeights(self.version, [worker._arena.digests() for worker in self.engine.workers])

    def find(self, weights: Path) -> dict[str, str]:
        host, port = address(self.url)
        return finding(VllmClient(host, port, None, 10), str(weights))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(EngineWithWorkers(tmp_path, 2))
    for rank, worker in enumerate(found.engine.workers):
        for name, value in expected(new_weights(), rank, 2).items():
            dict(worker._arena._parameters)[name].data[: len(value)] = value

    with ThreadedServer(lambda asked: Reply(body=msgspec.json.encode(found.answer(asked.path)))) as http:
        found.url = http.url
        yield found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in new_weights().items()}, folder / "model.safetensors")
    return folder


def test_the_weights_that_are_served_differ_nowhere(server: Server, files: Path) -> None:
    found = server.find(files)
    assert found["level"] == "ok", found
    assert f"policy version 3, 0 of {COUNT} tensors differ from" in found["found"]


def test_one_missed_element_of_one_rank_is_found_and_its_tensor_named(server: Server, files: Path) -> None:
    live = server.engine.workers[1]._arena._parameters["out"].data
    live[0, 0].view(torch.int32).bitwise_xor_(1)  # the last bit
    found = server.find(files)
    assert found["level"] == "fail"
    assert f"1 of {COUNT} tensors differ" in found["found"]
    assert found["found"].endswith(": out")
    assert "start the server again" in found["remedy"]


def test_files_of_another_version_are_named_as_the_reason(server: Server, files: Path) -> None:
    save_file({name: value + 1 for name, value in new_weights().items()}, files / "model.safetensors")
    write_policy_version(files, 2)
    found = server.find(files)
    assert f"{COUNT} of {COUNT} tensors differ" in found["found"]
    assert found["remedy"] == "that is policy version 2: give --weights the checkpoint of version 3"


def test_what_cannot_be_compared_fails_with_the_reason(server: Server, files: Path, tmp_path: Path) -> None:
    kept = {name: value for name, value in new_weights().items() if name != "norm"}
    save_file(kept, files / "model.safetensors")
    found = server.find(files)
    assert (found["level"], "nothing with that name for norm [4]" in found["found"]) == ("fail", True)
    assert "contains no safetensors" in server.find(tmp_path)["found"]
    server.url = "http://127.0.0.1:1"
    assert "did not answer GET /v1/bridge/status" in server.find(files)["found"]


@pytest.mark.parametrize("url", ["https://a:1", "http://a", "a", "http://a:1/v1", "http://a:99999"])
def test_what_is_not_an_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is not the address|[Pp]ort"):
        address(url)


def test_a_run_names_its_servers(tmp_path: Path) -> None:
    services = {"api": {"url": "http://x:8000"}, "vllm-1": {"url": "http://x:1"}, "vllm-2": {"url": "http://x:2"}}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"services": {}}, {"services": services}]}))
    assert doctor.urls_of_run(tmp_path) == ["http://x:1", "http://x:2"]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"services": {"api": {"url": "http://x:8000"}}}]}))
    with pytest.raises(ConfigError, match="starts vLLM itself"):
        doctor.urls_of_run(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere.*give http://HOST:PORT, or the directory of a run"):
        doctor.urls_of_run(tmp_path / "nowhere")


@pytest.mark.services
@pytest.mark.slow
def test_the_doctor_prints_what_differs_and_fails(
    server: Server, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.engine.workers[0]._arena._parameters["norm"].data[0] += 1
    assert doctor.main(["--live", f"{server.url},{server.url}", "--weights", str(files)]) == 1
    printed = capsys.readouterr().out
    assert printed.count(f"fail  live weights    {server.url}: policy version 3, 1 of {COUNT} tensors differ") == 2
    assert printed.splitlines()[-1] == "2 checks, 2 failed, 0 warnings: fix what failed before you start"
