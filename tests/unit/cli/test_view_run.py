import asyncio
from pathlib import Path

import httpx
import requests

from atroposlib.cli.view_run import ViewConfig, Watcher
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.cli.test_generation import group
from tests.unit.envs.fakes import Trainer, running_api


async def test_live_run_is_shown_and_keeps_everything(tmp_path: Path) -> None:
    async with running_api() as api, httpx.AsyncClient(trust_env=False) as client:
        watcher = Watcher(ViewConfig(api_url=api.url, tokenizer=str(save_tiny_tokenizer(tmp_path / "tokenizer"))))
        await watcher.look(client)
        assert "0 different groups" in watcher.page()
        trainer = Trainer(api.url, batch_size=4)
        await trainer.register()
        for scores in ((0.0, 1.0), (1.0, 0.5)):
            await asyncio.to_thread(requests.post, f"{api.url}/scored_data", json=group(*scores))
            await watcher.look(client)
            await watcher.look(client)
        page = watcher.page()
        assert "2 different groups" in page and "ask ask ask 1" in page and page.index("Group 2") < page.index("Group 1")
        assert len(await asyncio.wait_for(trainer.fetch(), 30)) == 2


async def test_api_that_is_away_is_said_on_the_page() -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        watcher = Watcher(ViewConfig(api_url="http://127.0.0.1:1"))
        await watcher.look(client)
    assert "http://127.0.0.1:1 cannot be asked" in watcher.page()
