"""Mode sglang against SGLang's own code: its HTTP server, tokenizer manager and weight updaters, over Gloo, around a
model that is not SGLang's (sglang_child.py).
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from example_trainer.bridges import BridgeError, sglang
from example_trainer.bridges.sglang import SglangBridge, SglangClient
from example_trainer.bridges.vllm_client import Refused
from example_trainer.model.loading import load_model
from example_trainer.weights.written import TrainedModel
from tests.client import http
from tests.integration.conftest import REPOSITORY
from tests.serving import free_port
from tests.unit.trainer.bridges.fake_sglang_server import ADMIN, OPEN
from tests.unit.trainer.bridges.test_sglang_bridge import change, config_to
from tests.unit.trainer.fakes import model_folder

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(3000)]

CPU = torch.device("cpu")
UPDATE = "/update_weights_from_distributed"


class Server:
    """SGLang's own code on `port`; `fault` makes its model fail in mid-load while it exists."""

    def __init__(self, folder: Path) -> None:
        self.port, self.fault = free_port(), folder / "fault"
        self.model = model_folder(folder / "model", vocab_size=300)
        self.tokenizer = str(save_tiny_tokenizer(folder / "tokenizer"))
        command = [str(REPOSITORY / ".venv-sglang/bin/python"), "-m", "tests.integration.sglang_child", self.model]
        self.log = folder / "sglang.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.port), OPEN, ADMIN, str(self.fault)],
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def ask(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {OPEN}"}
        return http.get(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=10).json()

    def bridge(self, **settings: Any) -> SglangBridge:
        """With a deadline that a busy machine keeps."""
        config = config_to(self.model, self, **{"bridge_timeout_s": 20, "vllm_start_timeout": 300} | settings)  # type: ignore[arg-type]
        connected = sglang.prepare(config, self.model, CPU).connect(TrainedModel(load_model(self.model, CPU)))
        assert isinstance(connected, SglangBridge)
        connected._buckets = connected._manifest.buckets(20_000)  # several
        assert len(connected._buckets) > 3
        return connected

    def sampling(self) -> ServerManager:
        settings = {"server_type": "sglang", "base_url": f"http://127.0.0.1:{self.port}", "api_key": OPEN}
        settings |= {"model_name": "m", "tokenizer_name": self.tokenizer}
        return ServerManager([APIServerConfig.model_validate(settings)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = os.environ | {"ATROPOS_PYTHON": sys.executable}
    setup = [REPOSITORY / "scripts/sglang_venv.sh"]
    subprocess.run(setup, check=True, timeout=1800, stdin=subprocess.DEVNULL, env=environment)
    started = Server(tmp_path_factory.mktemp("sglang"))
    try:
        yield started
    finally:
        started.process.send_signal(signal.SIGKILL)
        started.process.wait(30)
        print(started.log.read_text()[-3000:])


def test_it_serves_the_trainers_weights_after_each_sync(server: Server) -> None:
    bridge = server.bridge()
    assert bridge.served_dtype == "float32"
    for version in range(3):
        report = bridge.sync(version, lambda: change(bridge))
        assert report.stall_s > report.apply_s > 0
        assert bridge.parity_probe() < 1e-5
        assert server.ask("/model_info")["weight_version"] == str(version)
    bridge.close()


async def test_a_request_under_way_goes_on_and_each_token_has_its_version(server: Server) -> None:
    bridge = server.bridge()
    bridge.sync(5, lambda: None)
    servers = server.sampling()
    sampled = asyncio.create_task(servers.sample_tokens(prompt="1 + 1 =", max_tokens=40, temperature=1.0))
    await asyncio.sleep(0.7)
    await asyncio.to_thread(bridge.sync, 6, lambda: change(bridge))
    result = await asyncio.wait_for(sampled, 60)
    await servers.close()
    (sequence,) = result.sequences
    assert sequence.policy_versions == (5, 6)
    assert sequence.version_spans is not None
    (_, first), (start, second) = sequence.version_spans
    assert (first, second) == (5, 6)
    assert 0 < start < len(sequence.token_ids) == 40
    ours = bridge._trained.prompt_logprobs(result.prompt_token_ids + sequence.token_ids)[-40:]
    assert torch.allclose(ours[start:], torch.tensor(sequence.logprobs[start:], dtype=torch.float64), atol=1e-4)
    bridge.close()


def test_weights_outside_an_update_are_refused(server: Server) -> None:
    client = SglangClient("127.0.0.1", server.port, ADMIN, 20)
    order = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}
    with pytest.raises(Refused, match=r"\(400\): update_weights_from_distributed must run between"):
        client.order(UPDATE, order)
    with pytest.raises(Refused, match=r"\(401\): Unauthorized"):
        SglangClient("127.0.0.1", server.port, OPEN, 20).order("/begin_weight_update")


def test_a_load_that_fails_leaves_it_paused_until_the_next_trainers_first_sync(server: Server) -> None:
    bridge = server.bridge()
    bridge.sync(0, lambda: None)
    server.fault.touch()
    with pytest.raises(BridgeError) as failed:
        bridge.sync(1, lambda: change(bridge))
    server.fault.unlink()
    assert f"{UPDATE} failed: the SGLang server" in str(failed.value)
    assert "partially updated" in str(failed.value)
    assert re.search(r"with \d of \d+ buckets of new weights", str(failed.value))
    bridge.close()
    expect_nothing_is_generated(server)
    assert server.ask("/model_info")["weight_version"] == "0"
    repair(server)


def test_a_trainer_that_is_gone_in_mid_transfer_leaves_it_paused_until_the_next_one(server: Server) -> None:
    bridge = server.bridge()
    bridge.sync(0, lambda: None)
    (link,) = bridge._links
    link.admin.order("/pause_generation", {"mode": "retract"})
    link.begin()
    bucket = bridge._buckets[0]
    order = {
        "names": [tensor.name for tensor in bucket.tensors],
        "dtypes": [tensor.dtype for tensor in bucket.tensors],
        "shapes": [tensor.shape for tensor in bucket.tensors],
        "group_name": link._name,
        "load_format": "flattened_bucket",
    }
    told: list[Exception] = []

    def post() -> None:
        try:
            link.admin.order(UPDATE, order)
        except BridgeError as error:
            told.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    threading.Event().wait(0.5)
    del link._group  # its sockets close, as those of a process that is killed
    thread.join(30)
    assert "Failed to receive weights" in str(told[0])
    expect_nothing_is_generated(server)
    repair(server)


def expect_nothing_is_generated(server: Server) -> None:
    with pytest.raises(BridgeError, match="did not answer POST /generate"):
        SglangClient("127.0.0.1", server.port, OPEN, 1).prompt_logprobs([1, 2, 3])


def repair(server: Server) -> None:
    bridge = server.bridge()
    bridge.sync(9, lambda: change(bridge))
    assert bridge.parity_probe() < 1e-5
    assert server.ask("/model_info")["weight_version"] == "9"
    bridge.close()
