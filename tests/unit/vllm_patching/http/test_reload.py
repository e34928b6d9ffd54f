"""Weights by files: a directory is checked before anybody reads it, read while the old weights are served, and swapped
in on all ranks; whatever is wrong with it leaves the old ones served.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from safetensors.torch import save_file

from tests.unit.vllm_patching.engine_with_workers import HERE, EngineWithWorkers, make_sessions
from tests.unit.vllm_patching.memory.test_arena import DOWN, GATE_UP, HF_SHAPES, expected, manifest, new_weights
from tests.waiting import wait_until
from vllm_patching.http.routes import add_routes

TP_SIZE = 2
Weights = dict[str, torch.Tensor]


def weights(value: float, dtype: torch.dtype = torch.float32) -> Weights:
    return {name: torch.full(shape, value, dtype=dtype) for name, shape in HF_SHAPES.items()}


def write(folder: Path, *files: Weights, whole: bool = True) -> Path:
    """A directory as trainers write it: weights in one or more files, and last the digest of each."""
    folder.mkdir()
    for number, content in enumerate(files, start=1):
        save_file(content, folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
    if whole:
        write_digests(folder)
    return folder


def write_digests(folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps(files))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TestClient]:
    app = FastAPI()
    app.state.sessions, app.state.engine = make_sessions(tmp_path, TP_SIZE)
    add_routes(app)
    with TestClient(app) as client:
        yield client


def engine(server: TestClient) -> EngineWithWorkers:
    found: EngineWithWorkers = server.app.state.engine  # type: ignore[attr-defined]
    return found


def serves(server: TestClient, value: float) -> bool:
    return all(
        torch.equal(dict(worker._arena._parameters)[name][: len(part)], part)
        for rank, worker in enumerate(engine(server).workers)
        for name, part in expected(weights(value), rank, TP_SIZE).items()
    )


def offer(session: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "kind": "reload", "session": session, "trainer": "h:1", "lease_s": 60.0, "process": HERE,
        "manifest_digest": manifest().digest(), "timeout_s": 60.0,
    } | changes  # fmt: skip


def reload(server: TestClient, path: Path, version: int, session: str = "a") -> Any:
    return server.post("/v1/bridge/reload", json={"session": session, "policy_version": version, "path": str(path)})


def test_a_trainer_s_directories_are_served_one_after_the_other(server: TestClient, tmp_path: Path) -> None:
    assert server.post("/v1/bridge/session", json=offer()).status_code == 200
    first = {name: tensor for name, tensor in weights(3.0).items() if name < "n"}
    rest = {name: tensor for name, tensor in weights(3.0).items() if name >= "n"}
    reply = reload(server, write(tmp_path / "v7", first, rest), 7)
    assert reply.status_code == 200, reply.text
    assert reply.json()["policy_version"] == 7
    assert reply.json()["stall_s"] >= reply.json()["apply_s"] >= 0
    assert serves(server, 3.0)
    assert engine(server).label == "7"
    for version in (7, 9, 6):
        skipped = reload(server, tmp_path / "v7", version)
        assert skipped.status_code == 409
        assert f"policy version {version} does not follow 7" in skipped.text
    assert reload(server, write(tmp_path / "v8", weights(4.0, torch.bfloat16)), 8).status_code == 200
    assert serves(server, 4.0)
    assert server.delete("/v1/bridge/session/a").json() == {"policy_version": 8}


def test_experts_are_read_from_files_that_have_them_apart(server: TestClient, tmp_path: Path) -> None:
    stacked = new_weights()
    apart = {name: tensor for name, tensor in stacked.items() if name not in (GATE_UP, DOWN)}
    for expert in range(3):
        gate, up = stacked[GATE_UP][expert].chunk(2)
        for name, part in (("w1", gate), ("w3", up), ("w2", stacked[DOWN][expert])):
            apart[f"model.block_sparse_moe.experts.{expert}.{name}.weight"] = part.contiguous()
    server.post("/v1/bridge/session", json=offer())
    assert reload(server, write(tmp_path / "v1", apart), 1).status_code == 200
    for rank, worker in enumerate(engine(server).workers):
        live = dict(worker._arena._parameters)
        for name, part in expected(stacked, rank, TP_SIZE).items():
            assert torch.equal(live[name][: len(part)], part), name
    del apart["model.block_sparse_moe.experts.1.w3.weight"]
    refused = reload(server, write(tmp_path / "v2", apart), 2)
    assert refused.status_code == 422
    assert f"{GATE_UP} has 3 experts in the files, of which expert 1 is not whole" in refused.text


def test_what_is_staged_by_reload_is_swapped_under_a_pause(server: TestClient, tmp_path: Path) -> None:
    server.post("/v1/bridge/session", json=offer())
    reload(server, write(tmp_path / "v1", weights(1.0)), 1)
    calls = [call for call in engine(server).calls if call in ("bridge_request", "pause", "bridge_apply", "resume")]
    assert calls == ["bridge_request", "pause", "bridge_apply", "resume"]


def truncated(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-20])


def flipped(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def unfinished(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def linked_out(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    path.rename(folder.parent / "outside")
    path.symlink_to(folder.parent / "outside")


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "model-extra.safetensors")


def another_shape(folder: Path) -> None:
    save_file(weights(1.0) | {"out": torch.zeros(4, 5)}, next(folder.glob("*.safetensors")))
    write_digests(folder)


def missing_tensor(folder: Path) -> None:
    save_file({name: tensor for name, tensor in weights(1.0).items() if name != "k"}, next(folder.glob("*.saf*")))
    write_digests(folder)


def extra_tensor(folder: Path) -> None:
    save_file(weights(1.0) | {"lm_head": torch.zeros(2)}, next(folder.glob("*.safetensors")))
    write_digests(folder)


def integers(folder: Path) -> None:
    save_file(weights(1.0) | {"norm": torch.zeros(4, dtype=torch.int8)}, next(folder.glob("*.safetensors")))
    write_digests(folder)


def twice(folder: Path) -> None:
    save_file({"norm": torch.zeros(4)}, folder / "model-2.safetensors")
    write_digests(folder)


def unnamed(folder: Path) -> None:
    save_file({"norm": torch.zeros(4)}, folder / "model-2.safetensors")


def damaged_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100)


def manifest_that_names_others(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"../../etc/passwd": {"bytes": 1, "sha256": ""}}))


def no_weights(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def sharded(folder: Path) -> None:
    no_weights(folder)
    (folder / "shards").mkdir()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncated, "bytes, it was written with"),
    (flipped, "has its size but other contents than were written (SHA-256 differs)"),
    (unfinished, "manifest.json is not a regular file"),
    (linked_out, "or is a link out of it"),
    (fifo, "model-extra.safetensors is not a regular file"),
    (another_shape, "out: vLLM holds [4, 4], the directory [4, 5]"),
    (missing_tensor, "vLLM holds k [2, 4], the directory does not (7/8 tensors agree"),
    (extra_tensor, "the directory holds lm_head [2], vLLM does not"),
    (integers, "'norm' is I8, not one of"),
    (twice, "both contain 'norm'"),
    (unnamed, "manifest.json does not name ['model-2.safetensors']"),
    (damaged_manifest, "manifest.json is damaged"),
    (manifest_that_names_others, "manifest.json does not name"),
    (no_weights, "no directory with safetensors files is there"),
    (sharded, "is a sharded checkpoint, not a model: convert it with `atropos export"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_damaged_directory_is_refused_and_the_former_weights_are_served(
    server: TestClient, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    server.post("/v1/bridge/session", json=offer())
    assert reload(server, write(tmp_path / "v1", weights(1.0)), 1).status_code == 200
    damage(write(tmp_path / "v2", weights(2.0)))
    refused = reload(server, tmp_path / "v2", 2)
    assert refused.status_code == 422
    assert says in refused.json()["error"]["message"]
    assert serves(server, 1.0)
    assert server.get("/v1/bridge/status").json()["refusing"] is None
    assert reload(server, write(tmp_path / "v2-again", weights(2.0)), 2).status_code == 200
    assert serves(server, 2.0)


def test_a_manifest_cannot_lead_out_of_its_directory(server: TestClient, tmp_path: Path) -> None:
    server.post("/v1/bridge/session", json=offer())
    folder = write(tmp_path / "v1", weights(1.0))
    (tmp_path / "secret").write_text("x")
    names = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(names | {"../secret": {"bytes": 1, "sha256": ""}}))
    assert "secret is outside the directory" in reload(server, folder, 1).json()["error"]["message"]


@pytest.mark.parametrize("path", ["v1", "", "/nowhere", "/tmp/\u0000", "/dev/zero"])
def test_a_path_that_is_no_directory_is_refused(server: TestClient, path: str) -> None:
    server.post("/v1/bridge/session", json=offer())
    reply = server.post("/v1/bridge/reload", json={"session": "a", "policy_version": 1, "path": path})
    assert reply.status_code in (400, 422)
    assert reply.json()["error"]["message"].isprintable()


def test_a_worker_that_cannot_read_ends_the_session_and_nothing_is_swapped(
    server: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.post("/v1/bridge/session", json=offer())
    folder = write(tmp_path / "v1", weights(1.0))
    monkeypatch.setattr("vllm_patching.engines.reload.safe_open", breaks_at_second_call())
    failed = reload(server, folder, 1)
    assert failed.status_code == 500
    assert "reading failed on rank" in failed.text
    assert serves(server, 0.0)
    wait_until(lambda: all(worker["state"] == "failed" for worker in server.get("/v1/bridge/status").json()["workers"]))
    monkeypatch.undo()  # before which every rank has tried to read
    assert reload(server, folder, 1).status_code == 500  # over for good
    assert server.post("/v1/bridge/session", json=offer("b")).status_code == 200  # and another may come at once
    assert reload(server, folder, 1, "b").status_code == 200
    assert serves(server, 1.0)


def breaks_at_second_call() -> Any:
    from safetensors import safe_open

    calls: list[Path] = []

    def opened(path: Any, framework: str) -> Any:
        calls.append(path)
        if len(calls) > 1:
            raise OSError(5, "Input/output error")
        return safe_open(path, framework)

    return opened


def test_a_directory_is_served_by_hand_while_no_trainer_holds_the_server(server: TestClient, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", weights(5.0), whole=False)
    reply = server.post("/reload_weights", json={"path": str(folder)})
    assert reply.status_code == 200, reply.text
    assert reply.json()["policy_version"] == 1
    assert serves(server, 5.0)
    assert server.get("/v1/bridge/status").json()["session"] is None
    (folder / "policy.json").write_text('{"policy_version": 40}')
    assert server.post("/reload_weights", json={"path": str(folder)}).json()["policy_version"] == 40
    given = {"path": str(folder), "policy_version": 3}
    assert server.post("/reload_weights", json=given).json()["policy_version"] == 3
    (folder / "policy.json").write_text("{}")
    assert server.post("/reload_weights", json={"path": str(folder)}).status_code == 422
    server.post("/v1/bridge/session", json=offer())
    held = server.post("/reload_weights", json=given)
    assert held.status_code == 409
    assert "trainer h:1 holds session a" in held.text


def test_by_hand_needs_a_typed_body(server: TestClient, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", weights(5.0))
    bodies: tuple[Any, ...] = (
        {},
        {"path": 1},
        {"path": str(folder), "policy_version": -1},
        {"path": str(folder), "x": 1},
        [],
    )
    for body in bodies:
        assert server.post("/reload_weights", json=body).status_code == 400, body
    assert serves(server, 0.0)


@pytest.mark.parametrize("path", ["x" * 300, f"/tmp/{'x' * 300}", "/nowhere", "/dev/zero", "/tmp/\0"])
@pytest.mark.parametrize("version", [{}, {"policy_version": 1}])
def test_by_hand_a_path_that_cannot_be_looked_at_is_refused(
    server: TestClient, path: str, version: dict[str, int]
) -> None:
    reply = server.post("/reload_weights", json={"path": path, **version})
    assert reply.status_code == 422
    assert reply.json()["error"]["message"].isprintable()


def test_poisoned_weights_are_healed_by_hand(server: TestClient, tmp_path: Path) -> None:
    server.post("/v1/bridge/session", json=offer())
    engine(server).broken["bridge_apply"] = 1
    assert reload(server, write(tmp_path / "v1", weights(1.0)), 1).status_code == 500
    assert server.get("/v1/bridge/status").json()["poisoned"]
    engine(server).broken.clear()
    server.delete("/v1/bridge/session/a")
    assert server.post("/reload_weights", json={"path": str(tmp_path / "v1")}).status_code == 200
    assert server.get("/v1/bridge/status").json()["refusing"] is None
    assert serves(server, 1.0)
