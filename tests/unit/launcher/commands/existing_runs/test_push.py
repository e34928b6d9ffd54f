"""`atropos push`: whole models alone leave the run, to a hub or into a directory."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.commands.existing_runs.push import PushError, copy, main, trained_model
from example_trainer.weights.manifest import write_manifest
from tests.serving import Asked, Reply, ThreadedServer


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


class Hub:
    """What of a model hub an upload of small files needs."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked.path)
        content = json.dumps(self.reply(asked)).encode()
        return Reply(body=content, headers={"Content-Type": "application/json"})

    def reply(self, asked: Asked) -> dict[str, Any]:
        base = f"http://{asked.headers['Host']}"
        if asked.path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if asked.path == "/api/repos/create":
            return {"url": f"{base}/me/{json.loads(asked.body)['name']}"}
        if asked.path.endswith("/preupload/main"):
            files = json.loads(asked.body)["files"]
            return {"files": [dict(path=f["path"], uploadMode="regular", shouldIgnore=False) for f in files]}
        if asked.path.endswith("/commit/main"):
            for line in map(json.loads, asked.body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{base}/me/it/commit/c", "commitOid": "c", "success": True}
        return {"sha": "c", "siblings": []}


def push_to(endpoint: str, run: Path, repository: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "atropos_launcher", "push", str(run), "--hub", repository]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)


@pytest.mark.services
def test_a_hub_gets_every_file_in_one_commit(run: Path) -> None:
    hub = Hub()
    with ThreadedServer(hub.answer) as server:
        done = push_to(server.url, run, "me/it")
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
