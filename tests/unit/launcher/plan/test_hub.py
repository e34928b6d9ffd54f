"""A model of the hub is looked up before anything starts: a server on this machine is the hub."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 600,
}
REFUSED = {"gated": (403, "GatedRepo"), "empty": (404, "EntryNotFound"), "tpyo": (404, "RepoNotFound")}


class Hub(BaseHTTPRequestHandler):
    """Gives config.json of me/tiny; me/gated needs a licence, me/empty has no such file, the rest is not there."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.wfile.write(self.answer())

    def answer(self) -> bytes:
        server: Any = self.server
        server.asked.append(self.path)
        name = self.path.split("/")[2] if self.path != "/" else ""
        status, code = REFUSED.get(name, (200, ""))
        content = json.dumps(CONFIG).encode() if name == "tiny" else b""
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"e"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return content

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def planned(endpoint: str, cache: Path, *words: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": str(int(offline))}
    command = [sys.executable, "-m", "atropos_launcher", "train", "arithmetic", *words, "--dry-run"]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)


@pytest.mark.services
def test_the_plan_knows_size_and_context_of_a_model_that_is_not_here(hub: Any, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    done = planned(endpoint, tmp_path, "me/tiny")
    assert done.returncode == 0, done.stderr
    assert f"Asking {endpoint} for the config.json of me/tiny" in done.stderr
    assert "by its config.json" in done.stdout
    asked = len(hub.asked)
    refused = planned(endpoint, tmp_path, "me/tiny", "--vllm.max-model-len", "1024")
    assert refused.returncode == 2
    assert "vllm.max_model_len 1024 is above the 600 tokens of context of me/tiny" in refused.stderr
    assert len(hub.asked) == asked  # the cache has it


@pytest.mark.services
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("me/tpyo", "is neither a directory here nor a model at http://127.0.0.1"),
        ("me/gated", "needs a licence: accept it at http://127.0.0.1"),
        ("me/empty", "has no config.json at http://127.0.0.1"),
        ("one/two/three", "is neither a model's directory nor an id of the hub"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused(model: str, words: str, hub: Any, tmp_path: Path) -> None:
    done = planned(f"http://127.0.0.1:{hub.server_port}", tmp_path, model)
    assert done.returncode == 2
    assert f"--model {model} {words}" in done.stderr.splitlines()[-1]


@pytest.mark.services
@pytest.mark.parametrize("offline", [True, False])
def test_without_a_hub_the_plan_goes_by_the_name(offline: bool, tmp_path: Path) -> None:
    done = planned("http://127.0.0.1:9", tmp_path, "me/tiny-0.1B", offline=offline)
    assert done.returncode == 0, done.stderr
    assert ("for the hub does not answer" in done.stderr) is not offline
    assert "by its name" in done.stdout


@pytest.mark.services
def test_advice_at_the_end_of_a_run_asks_no_hub(hub: Any, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
    code = "from atropos_launcher.commands.train import is_accepted; is_accepted('train arithmetic me/tiny-0.1B')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr, hub.asked) == (0, "", [])
