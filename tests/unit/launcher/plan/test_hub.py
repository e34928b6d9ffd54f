"""A model of the hub is looked up before anything starts: a server on this machine is the hub."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_launcher.plan.hub import expect_model
from atroposlib.flags import ConfigError
from tests.serving import Asked, Reply, ThreadedServer

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


class Hub(ThreadedServer):
    """Gives config.json of me/tiny; me/gated needs a licence, me/empty has no such file, the rest is not there."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(self.answer)

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked.path)
        name = asked.path.split("/")[2] if asked.path != "/" else ""
        status, code = REFUSED.get(name, (200, ""))
        content = json.dumps(CONFIG).encode() if name == "tiny" else b""
        headers = {"ETag": '"e"', "X-Repo-Commit": "c" * 40, **({"X-Error-Code": code} if code else {})}
        return Reply(status, content, headers)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


def planned(endpoint: str, cache: Path, *words: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": str(int(offline))}
    command = [sys.executable, "-m", "atropos_launcher", "train", "arithmetic", *words, "--dry-run"]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)


@pytest.mark.services
def test_the_plan_knows_size_and_context_of_a_model_that_is_not_here(hub: Hub, tmp_path: Path) -> None:
    endpoint = hub.url
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
def test_a_model_that_the_hub_does_not_give_is_refused(model: str, words: str, hub: Hub, tmp_path: Path) -> None:
    done = planned(hub.url, tmp_path, model)
    assert done.returncode == 2
    assert f"--model {model} {words}" in done.stderr.splitlines()[-1]


@pytest.mark.services
@pytest.mark.parametrize("model", ["me/tpyo", "my-model", "one/two/three"])
def test_the_name_that_a_running_server_gives_its_model_is_no_name_of_the_hub(
    model: str, hub: Hub, tmp_path: Path
) -> None:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    words = ["evaluate", "arithmetic", model, "--base-url", "http://127.0.0.1:9/v1", "--dry-run"]
    command = [sys.executable, "-m", "atropos_launcher", *words]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, hub.asked) == (0, "", [])


@pytest.mark.services
@pytest.mark.parametrize("offline", [True, False])
def test_without_a_hub_the_plan_goes_by_the_name(offline: bool, tmp_path: Path) -> None:
    done = planned("http://127.0.0.1:9", tmp_path, "me/tiny-0.1B", offline=offline)
    assert done.returncode == 0, done.stderr
    assert ("for the hub does not answer" in done.stderr) is not offline
    assert "by its name" in done.stdout


@pytest.mark.parametrize("model", ["one/two/three", "my model"])
@pytest.mark.parametrize("offline", [True, False])
def test_what_cannot_be_an_id_is_refused_without_a_hub(
    model: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=f"--model {model} is neither a model's directory nor an id of the hub"):
        expect_model(model, "--model")


@pytest.mark.services
def test_advice_at_the_end_of_a_run_asks_no_hub(hub: Hub, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    code = "from atropos_launcher.commands.train import is_accepted; is_accepted('train arithmetic me/tiny-0.1B')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr, hub.asked) == (0, "", [])
