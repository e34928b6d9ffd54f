import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from atroposlib.cli import view_run, view_run_multimodal  # type: ignore[attr-defined]  # an old path
from atroposlib.compat.commands import view_run as view_run_module
from atroposlib.compat.commands.view_run import ViewConfig, Watcher
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.client import http
from tests.unit.compat.test_generation import group
from tests.unit.envs.fakes import Trainer, running_api


async def test_live_run_is_shown_and_keeps_everything(tmp_path: Path) -> None:
    async with running_api() as api, httpx.AsyncClient(trust_env=False) as client:
        watcher = Watcher(ViewConfig(api_url=api.url, tokenizer=str(save_tiny_tokenizer(tmp_path / "tokenizer"))))
        await watcher.look(client)
        assert "0 different groups" in watcher.page()
        trainer = Trainer(api.url, batch_size=4)
        await trainer.register()
        for scores in ((0.0, 1.0), (1.0, 0.5)):
            await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(*scores))
            await watcher.look(client)
            await watcher.look(client)
        page = watcher.page()
        assert "2 different groups" in page
        assert "ask ask ask 1" in page
        assert page.index("Group 2") < page.index("Group 1")
        assert len(await asyncio.wait_for(trainer.fetch(), 30)) == 2


async def test_images_that_stand_in_the_data_are_shown_and_nothing_else_is_fetched() -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    parts = [
        {"type": "text", "text": "What is <this>?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}},
        {"type": "image_url", "image_url": {"url": "https://elsewhere/tracker.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,x' onerror='alert(1)"}},
    ]
    said = [[{"role": "user", "content": parts}, {"role": "assistant", "content": "A pixel."}] for _ in range(2)]
    async with running_api() as api, httpx.AsyncClient(trust_env=False) as client:
        watcher = Watcher(ViewConfig(api_url=api.url))
        trainer = Trainer(api.url, batch_size=4)
        await trainer.register()
        body = group(0.0, 1.0) | {"messages": said, "images": [pixel, "no image"]}
        await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=body)
        await watcher.look(client)
    page = watcher.page()
    assert page.count(f"<img src='data:image/png;base64,{pixel}'>") == 3 == page.count("<img ")
    assert "What is &lt;this&gt;?" in page
    assert "https://elsewhere/tracker.png" in page
    assert "onerror='" not in page


async def test_what_is_open_stays_open_because_only_new_groups_are_added() -> None:
    async with running_api() as api, httpx.AsyncClient(trust_env=False) as client:
        watcher = Watcher(ViewConfig(api_url=api.url))
        await Trainer(api.url, batch_size=4).register()
        page = TestClient(view_run.create_app(watcher), base_url="http://127.0.0.1")
        for number in (1, 2):
            await asyncio.to_thread(http.post, f"{api.url}/scored_data", json=group(0.0, float(number)))
            await watcher.look(client)
            found = page.get("/new", params={"after": number - 1}).json()
            assert found["last"] == number
            assert found["html"].count("<details><summary>Group ") == 1
        assert page.get("/new", params={"after": 2}).json()["html"] == ""
    assert "http-equiv" not in watcher.page()


def test_with_a_run_directory_it_opens_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Any, Any, str]] = []
    monkeypatch.setattr(view_run_module, "run", lambda *given: served.append(given))
    view_run.main([str(tmp_path), "--port", "9123", "--interval", "3"])
    ((options, runs, page),) = served
    assert (options.host, options.port) == ("127.0.0.1", 9123)
    assert list(runs.all()) == [tmp_path.name]
    assert page == f"#/run/{tmp_path.name}"


def test_a_run_that_is_no_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        view_run.main([str(tmp_path / "nobody")])
    assert "nobody is not a directory" in capsys.readouterr().err


def test_command_of_the_ancestor_is_the_same_program() -> None:
    assert view_run_multimodal.main is view_run.main


async def test_flags_of_the_ancestor_are_taken_and_the_group_size_limits_what_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Watcher] = []
    monkeypatch.setattr(view_run_module, "create_app", built.append)
    monkeypatch.setattr("uvicorn.run", lambda app, **options: None)
    view_run.main("--port 9123 --group-size 1 --max-token-len 64".split())
    (watcher,) = built
    assert (watcher.config.port, watcher.config.api_url) == (9123, "http://localhost:8000")
    body = {"scores": [0.25, 0.75], "tokens": [[1], [2]], "messages": None, "images": None, "rollouts": None}
    watcher.groups.appendleft({**body, "number": 1})
    assert "score 0.25" in watcher.page()
    assert "score 0.75" not in watcher.page()
    watcher.config.group_size = None
    assert "score 0.75" in watcher.page()


async def test_api_that_is_away_is_said_on_the_page() -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        watcher = Watcher(ViewConfig(api_url="http://127.0.0.1:1"))
        await watcher.look(client)
    assert "http://127.0.0.1:1 does not answer" in watcher.page()


def test_the_page_is_shown_under_its_own_names_only() -> None:
    config = ViewConfig(api_url="http://127.0.0.1:1", allowed_host=["runs.example"])
    client = TestClient(view_run.create_app(Watcher(config)))
    assert client.get("/", headers={"Host": "runs.example"}).status_code == 200
    assert client.get("/", headers={"Host": "evil.test:9002"}).status_code == 403
