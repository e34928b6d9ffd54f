"""`atropos push`: whole models alone leave the run, to a hub or into a directory."""

import base64
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

from atropos_launcher.commands.existing_runs.push import PushError, copy, main, trained_model
from example_trainer.weights.manifest import write_manifest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a final model of two files."""
    model = tmp_path / "runs" / "first" / "checkpoints" / "final_model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "README.md").write_text("# A model")
    write_manifest(model)
    return tmp_path / "runs" / "first"


def push(run: Path, *flags: str) -> int:
    return main([run.name, "--runs", str(run.parent), *flags])


def test_a_directory_gets_the_model_as_it_was_written(run: Path, tmp_path: Path) -> None:
    assert push(run, "--directory", str(tmp_path / "out" / "model")) == 0
    names = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert names == {"config.json", "README.md", "manifest.json"}


def test_a_directory_that_is_there_stays_as_it_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(PushError, match=r"--directory .*model exists: give another one, or remove it"):
        push(run, "--directory", str(tmp_path / "model"))
    assert not list((tmp_path / "model").iterdir())


def test_a_copy_that_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", full)
    with pytest.raises(PushError, match=r"No space left on device; free space, or give another --directory"):
        copy(run / "checkpoints" / "final_model", tmp_path / "model")
    assert not [path for path in tmp_path.iterdir() if "model" in path.name]


def test_a_sharded_checkpoint_is_no_model_to_push(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints/step_4/shards").mkdir(parents=True)
    with pytest.raises(
        PushError, match=r"step_4 is a sharded checkpoint, not a model: convert it with `atropos export"
    ):
        push(run, "--checkpoint", "step_4", "--directory", str(tmp_path / "out"))


def test_a_damaged_model_is_not_pushed(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "final_model" / "config.json").write_text("{ }")
    with pytest.raises(PushError, match=r"config.json has 3 bytes"):
        push(run, "--directory", str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_a_run_without_a_final_model_says_what_it_has(run: Path) -> None:
    (run / "checkpoints" / "final_model").rename(run / "checkpoints" / "step_4")
    with pytest.raises(
        PushError, match=r"has no final_model or final_adapter; it has step_4: name one with --checkpoint"
    ):
        trained_model(run, None)
    assert trained_model(run, "step_4").name == "step_4"


class Hub(BaseHTTPRequestHandler):
    """What of a model hub an upload of small files needs."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.body()
        hub: Any = self.server
        hub.asked.append(self.path)
        base = f"http://127.0.0.1:{hub.server_port}"
        if self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            self.answer({"url": f"{base}/me/{json.loads(body)['name']}"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            self.answer({"files": [dict(path=f["path"], uploadMode="regular", shouldIgnore=False) for f in files]})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{base}/me/it/commit/c", "commitOid": "c", "success": True})

    def body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def do_GET(self) -> None:
        self.answer({"sha": "c", "siblings": []})

    def answer(self, reply: dict[str, Any]) -> None:
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push_to(endpoint: str, run: Path, repository: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "atropos_launcher", "push", str(run), "--hub", repository]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)


@pytest.mark.services
def test_a_hub_gets_every_file_in_one_commit(run: Path, hub: Any) -> None:
    done = push_to(f"http://127.0.0.1:{hub.server_port}", run, "me/it")
    assert done.returncode == 0, done.stderr
    assert hub.files["config.json"] == b"{}"
    assert hub.files["README.md"] == b"# A model"
    assert sum(path.endswith("/commit/main") for path in hub.asked) == 1
    assert "Pushed" in done.stdout


@pytest.mark.services
def test_a_hub_that_is_not_there_is_one_line(run: Path) -> None:
    done = push_to("http://127.0.0.1:9", run, "me/it")
    assert done.returncode == 1
    assert done.stderr.startswith("atropos push: error: cannot push to me/it: ")
    assert done.stderr.count("\n") == 1
    assert "log in with `hf auth login`" in done.stderr
