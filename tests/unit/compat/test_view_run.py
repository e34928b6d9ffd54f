import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from atroposlib.cli import view_run, view_run_multimodal  # type: ignore[attr-defined]  # an old path
from atroposlib.compat.commands import view_run as view_run_module
from atroposlib.compat.commands.view_run import ViewConfig, Watcher
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.view.run_data.runs import Runs
from tests.client import http
from tests.unit.compat.test_generation import group
from tests.unit.envs.fakes import Trainer, running_api
from tests.unit.view.support import client, get

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = f"data:image/png;base64,{PIXEL}"


class Live:
    """A watcher of an API, with the window on what it keeps."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.watcher = Watcher(ViewConfig(**settings), folder / "live")
        self._http = httpx.Client(trust_env=False)

    @property
    def window(self) -> TestClient:
        """A new one each time, because one looks for new files a few times a second only."""
        return client(self.watcher.directory)

    async def look(self) -> None:
        await asyncio.to_thread(self.watcher.look, self._http)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = get(self.window, "/api/runs/live/groups")["rows"]
        return rows

    def whole(self, row: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = get(self.window, f"/api/runs/live/groups/{row['n']}")
        return found


async def test_live_run_is_shown_and_keeps_everything(tmp_path: Path) -> None:
    async with running_api() as api:
        live = Live(tmp_path, api_url=api.url, tokenizer=str(save_tiny_tokenizer(tmp_path / "tokenizer")))
        await live.look()
        assert live.rows() == []
        trainer = Trainer(api.url, batch_size=4)
        await trainer.register()
        for scores in ((0.0, 1.0), (1.0, 0.5)):
            await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(*scores))
            await live.look()
            await live.look()
        assert [row["scores"] for row in live.rows()] == [[1.0, 0.5], [0.0, 1.0]]
        assert live.rows()[0]["question"] == "ask ask ask 0"
        (run,) = get(live.window, "/api/runs")["runs"]
        assert (run["state"], run["problems"]) == ("running", [])
        (line,) = get(live.window, "/api/runs/live/logs", service="launcher")["lines"]
        assert line == f"2 different groups seen at {api.url}"
        assert len(await asyncio.wait_for(trainer.fetch(), 30)) == 2


async def test_images_that_stand_in_the_data_are_shown_and_nothing_else_is_fetched(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "What is <this>?"},
        {"type": "image_url", "image_url": {"url": IMAGE}},
        {"type": "image_url", "image_url": {"url": "https://elsewhere/tracker.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,x' onerror='alert(1)"}},
    ]
    said = [[{"role": "user", "content": parts}, {"role": "assistant", "content": "A pixel."}] for _ in range(2)]
    async with running_api() as api:
        live = Live(tmp_path, api_url=api.url)
        await Trainer(api.url, batch_size=4).register()
        body = group(0.0, 1.0) | {"messages": said, "images": [PIXEL, "no image"]}
        await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=body)
        await live.look()
    first, second = live.whole(live.rows()[0])["rollouts"]
    assert (first["images"], second["images"]) == ([IMAGE], [])
    for one in (first, second):
        assert one["messages"][0]["images"] == [IMAGE]
        assert one["messages"][0]["content"].startswith("What is <this>?\n[image_url, ")
        assert "images" not in one["messages"][1]


@pytest.mark.parametrize("tokens", [[2**40], ["word"]])
def test_tokens_that_the_tokenizer_cannot_decode_are_told_and_the_next_group_is_shown(
    tmp_path: Path, tokens: list[object]
) -> None:
    groups = [group(0.0, 1.0) | {"tokens": [tokens, tokens], "messages": None}, group(0.0, 0.5)]
    replies = iter(groups)
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    watcher = Watcher(ViewConfig(api_url="http://api", tokenizer=tokenizer), tmp_path / "live")
    with httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, json=next(replies)))) as http_:
        watcher.look(http_)
        assert watcher.note.startswith("the tokens of a group at http://api cannot be decoded: ")
        watcher.look(http_)
    assert watcher.note == "1 different groups seen at http://api"


async def test_a_group_keeps_its_address_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    async with running_api() as api:
        live = Live(tmp_path, api_url=api.url, groups=2)
        await Trainer(api.url, batch_size=4).register()
        seen: list[dict[str, Any]] = []
        for number in (1, 2, 3):
            await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(0.0, float(number)))
            await live.look()
            seen.append(live.rows()[0])
    assert live.rows() == seen[:0:-1]
    assert live.whole(seen[1])["rollouts"][1]["score"] == 2.0


def test_with_a_run_directory_it_opens_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Any, Any, str]] = []
    monkeypatch.setattr(view_run_module, "run", lambda *given: served.append(given))
    view_run.main([str(tmp_path), "--port", "9123", "--interval", "3"])
    ((options, runs, page),) = served
    assert (options.host, options.port) == ("127.0.0.1", 9123)
    assert list(runs.all()) == [tmp_path.name]
    assert page == f"#/run/{tmp_path.name}"


def test_a_token_that_no_header_carries_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(view_run_module, "run", lambda *given: None)
    with pytest.raises(SystemExit):
        view_run.main(["--port", "9123", "--token", "geheimnisvöll"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("view-run: error: --token: a token has printable ASCII characters")
    assert "geheim" not in line


def test_a_run_that_is_no_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        view_run.main([str(tmp_path / "nobody")])
    assert "nobody is not a directory" in capsys.readouterr().err


def test_command_of_the_ancestor_is_the_same_program() -> None:
    assert view_run_multimodal.main is view_run.main


async def test_flags_of_the_ancestor_are_taken_and_the_group_size_limits_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[Any, Any, str]] = []
    monkeypatch.setattr(view_run_module, "run", lambda *given: served.append(given))
    view_run.main("--port 9123 --group-size 1 --max-token-len 64 --api-url http://127.0.0.1:1".split())
    ((options, runs, page),) = served
    assert (options.port, list(runs.all()), page) == (9123, ["127.0.0.1_1"], "#/run/127.0.0.1_1/groups")
    async with running_api() as api:
        await Trainer(api.url, batch_size=4).register()
        await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(0.25, 0.75))
        for size, scores in ((1, [0.25]), (None, [0.25, 0.75])):
            live = Live(tmp_path / str(size), api_url=api.url, group_size=size)
            await live.look()
            assert live.rows()[0]["scores"] == scores


async def test_api_that_is_away_is_said_on_the_page(tmp_path: Path) -> None:
    live = Live(tmp_path, api_url="http://127.0.0.1:1")
    await live.look()
    (line,) = get(live.window, "/api/runs/live/logs", service="launcher")["lines"]
    assert line.startswith("http://127.0.0.1:1 does not answer")


def test_the_page_is_shown_under_its_own_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[ASGIApp] = []
    monkeypatch.setattr(uvicorn, "Config", lambda app, **options: apps.append(app))
    monkeypatch.setattr(uvicorn, "Server", lambda config: SimpleNamespace(run=lambda sockets: None))
    view_run.main("--port 0 --allowed-host runs.example --api-url http://127.0.0.1:1".split())
    window = TestClient(apps[0])
    assert window.get("/", headers={"Host": "runs.example"}).status_code == 200
    assert window.get("/", headers={"Host": "evil.test:9002"}).status_code == 403


def test_what_a_live_run_left_on_the_disk_goes_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    during: list[list[str]] = []

    def run(options: object, runs: Runs, page: str) -> None:
        during.append([path.name for path in tmp_path.iterdir()])
        assert not runs.keep_notes  # they would go, too

    monkeypatch.setattr(view_run_module, "run", run)
    view_run.main(["--api-url", "http://127.0.0.1:1"])
    assert [len(names) for names in during] == [1]
    assert list(tmp_path.iterdir()) == []
