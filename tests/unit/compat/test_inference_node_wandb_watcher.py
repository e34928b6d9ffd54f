import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.compat.commands.inference_node_wandb_watcher import WatcherConfig, run
from atroposlib.envs.errors import EnvError, PeerError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import Trainer, running_api
from tests.waiting import until


class FakeWandb:
    """What the watcher uses of the wandb package: a run that keeps what it is given."""

    Error = RuntimeError

    def __init__(self) -> None:
        self.named: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def init(self, **arguments: Any) -> Any:
        self.named = arguments
        return SimpleNamespace(log=lambda metrics, step: self.logged.append((step, metrics)), finish=self.finish)

    def Settings(self, **arguments: Any) -> dict[str, Any]:
        return arguments

    def finish(self) -> None:
        self.finished = True

    async def shows(self, step: int, **values: float) -> None:
        """Return when these values have been logged at `step`."""
        wanted = (step, {f"server/server_health_3_{name[1:]}": value for name, value in values.items()})
        await until(lambda: wanted in self.logged)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


async def test_health_of_each_server_is_logged_at_the_step_of_the_api(wandb: FakeWandb) -> None:
    async with running_api() as api, FakeInferenceServer() as server:
        config = WatcherConfig(
            api_addr=api.url, tp=4, node_num=3, first_port=server.port, host="127.0.0.1", interval=0.02
        )
        watching = asyncio.create_task(run(config))
        await asyncio.sleep(0.1)
        assert not wandb.named  # no trainer has named a project
        trainer = Trainer(api.url, batch_size=2, project="p")
        await trainer.register()
        async with asyncio.timeout(30):
            await wandb.shows(0, _0=1.0, _1=0.0)
            server.healthy = False
            await wandb.shows(0, _0=0.0, _1=0.0)
            await api.stop()
            count = len(wandb.logged)
            await until(lambda: len(wandb.logged) >= count + 2)
            await api.start()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert (wandb.named["project"], wandb.named["group"]) == ("p", "g")
    assert wandb.named["name"].startswith("inf_node_3-")
    assert wandb.finished


async def test_watcher_without_an_api_ends_with_the_remedy(wandb: FakeWandb) -> None:
    config = WatcherConfig(api_addr="http://127.0.0.1:1", tp=8, node_num=0, startup_timeout=0.1)
    with pytest.raises(PeerError, match=r"no W&B project from http://127.0.0.1:1 within 0.1 s.*correct --api-addr"):
        await run(config)


async def test_watcher_without_wandb_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    async with running_api() as api:
        await Trainer(api.url, batch_size=2, project="p").register()
        with pytest.raises(EnvError, match="nowhere to log to"):
            await run(WatcherConfig(api_addr=api.url, tp=8, node_num=0))
