"""The one thing that the window writes: a note and tags of a run, and who may not."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from atroposlib.view.run_data.notes import MAX_BYTES, MAX_NOTE, MAX_TAG, MAX_TAGS
from atroposlib.view.run_data.runs import Runs
from atroposlib.view.server import create_app
from tests.unit.view.support import client, get

NOTES = "/api/runs/r/notes"
KEPT = {"note": "lr twice as high;\nthe curve falls after step 10", "tags": ["baseline", "lr 4e-5"]}


def listed(window: TestClient) -> dict[str, object]:
    (run,) = get(window, "/api/runs")["runs"]
    assert run["problems"] == []
    found: dict[str, object] = run["notes"]
    return found


def test_a_note_and_tags_are_kept_with_the_run(run: Path) -> None:
    window = client(run)
    assert listed(window) == {"note": "", "tags": []}
    before = {path.name for path in run.iterdir()}
    reply = window.put(NOTES, json=KEPT | {"tags": ["baseline", "lr 4e-5", "baseline"]})
    assert (reply.status_code, reply.json()) == (200, {"notes": KEPT})
    assert listed(client(run)) == KEPT
    assert {path.name for path in run.iterdir()} - before == {"notes.json"}
    assert window.put(NOTES, json={}).status_code == 200
    assert listed(window) == {"note": "", "tags": []}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"{", "the notes cannot be kept"),
        (b'{"note": 3}', "note"),
        (b'{"path": "../x"}', "path"),
        (json.dumps({"note": "x" * (MAX_NOTE + 1)}).encode(), f"{MAX_NOTE}"),
        (json.dumps({"tags": ["x"] * (MAX_TAGS + 1)}).encode(), f"{MAX_TAGS}"),
        (json.dumps({"tags": ["x" * (MAX_TAG + 1)]}).encode(), f"{MAX_TAG}"),
        (json.dumps({"tags": [""]}).encode(), "1"),
        (json.dumps({"note": "red \x1b[31m"}).encode(), "printable"),
        (b"[" * 10_000, "the notes cannot be kept"),
    ],
)
def test_what_is_no_note_is_refused_with_the_reason(run: Path, sent: bytes, said: str) -> None:
    window = client(run)
    window.put(NOTES, json=KEPT)
    reply = window.put(NOTES, content=sent, headers={"Content-Type": "application/json"})
    assert reply.status_code == 422
    assert said in reply.json()["detail"]
    assert listed(window) == KEPT


def test_a_large_body_is_not_read_to_its_end(run: Path) -> None:
    reply = client(run).put(NOTES, content=b" " * (MAX_BYTES + 1), headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["detail"]) == (413, f"notes have at most {MAX_BYTES} bytes")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.test:8400"},
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Mode": "navigate"},
    ],
)
def test_pages_of_others_write_nothing(run: Path, headers: dict[str, str]) -> None:
    assert client(run).put(NOTES, json=KEPT, headers=headers).status_code == 403
    assert not (run / "notes.json").exists()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_could_send_is_refused(run: Path, kind: str) -> None:
    reply = client(run).put(NOTES, content=json.dumps(KEPT), headers={"Content-Type": kind})
    assert reply.status_code == 415
    assert not (run / "notes.json").exists()


def test_a_window_that_others_reach_writes_nothing(run: Path) -> None:
    for app in (
        create_app(Runs([run]), "0.0.0.0"),
        create_app(Runs([run]), allowed_hosts=["proxy.example"]),
        create_app(Runs([run], keep_notes=False)),
    ):
        window = TestClient(app, base_url="http://127.0.0.1")
        assert window.put(NOTES, json=KEPT).status_code == 403
    assert not (run / "notes.json").exists()


def test_no_path_leads_elsewhere(run: Path) -> None:
    window = client(run)
    for path in ("/api/runs/../r/notes", "/api/runs/nobody/notes", "/api/runs/..%2f..%2fetc/notes"):
        assert window.put(path, json=KEPT).status_code == 404
    target = run.parent / "target"
    target.write_text("mine")
    (run / "notes.json").symlink_to(target)
    assert window.put(NOTES, json=KEPT).status_code == 409
    assert target.read_text() == "mine"
    (found,) = get(window, "/api/runs")["runs"]
    assert "notes.json is a link" in found["problems"][0]
