"""`inference-node-wandb-watcher`: which inference servers of this node answer, as metrics of the run's W&B project.

One is started on each inference node. It waits for the trainer to name a project, then asks every server of the node
(ports 9000, 9001, ..., one for `tp` of its GPUs) every minute, and logs `server/server_health_<node>_<i>`, 1 or 0,
at the API's step. While the API is down, one line is logged and metrics are recorded at the last known step.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import httpx
from pydantic import Field, SecretStr

from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, AsyncBatchingApi, Flags
from atroposlib.clients.waiting import NotYet
from atroposlib.config import Config, load_config
from atroposlib.envs.errors import EnvError
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.metrics import WandbSink, open_wandb
from atroposlib.errors import one_line_errors
from atroposlib.logs import configure_logging, get_logger
from atroposlib.wire.routes import STATUS, WANDB_INFO

log = get_logger(__name__)

REQUEST_TIMEOUT_S = 10.0


class WatcherConfig(Config):
    """Log the health of one node's inference servers to Weights & Biases."""

    api_addr: str = Field(description="Address of the batching API, e.g. http://node1:8000.")
    tp: int = Field(ge=1, description="GPUs of one inference server.")
    node_num: int = Field(ge=0, description="Number of this node, part of the names of its metrics.")
    token: SecretStr | None = Field(
        default=None, description="Token of the API.", json_schema_extra={"env": "ATROPOS_API_TOKEN"}
    )
    gpus: int = Field(default=8, ge=1, description="GPUs of the node.")
    host: str = Field(default="localhost", description="Address of the node's servers.")
    first_port: int = Field(default=9000, ge=1, le=65535, description="Port of the first server; the others follow.")
    health_path: str = Field(
        default="/health", description="Path to request from each server; status 200 counts as healthy."
    )
    interval: float = Field(default=60.0, gt=0, description="Seconds between two checks.")
    startup_timeout: float = Field(
        default=1800.0, gt=0, description="Seconds to wait for the trainer to name a project."
    )

    @property
    def servers(self) -> dict[str, str]:
        """Address of each server's health by the name of its metric."""
        return {
            f"server/server_health_{self.node_num}_{index}": (
                f"http://{self.host}:{self.first_port + index}{self.health_path}"
            )
            for index in range(self.gpus // self.tp)
        }


async def project(config: WatcherConfig, api: AsyncBatchingApi) -> tuple[str | None, str]:
    """(group, project) that the trainer named. Raises PeerError after the timeout."""

    async def attempt() -> tuple[str | None, str]:
        try:
            named = await api.call(WANDB_INFO)
        except ApiRefused as error:
            raise NotYet(str(error)) from None
        if not named.project:
            raise NotYet("no trainer has named one")
        return named.group, named.project

    return await wait_for_peer(
        "W&B project",
        config.api_addr,
        attempt,
        timeout_s=config.startup_timeout,
        remedy="start the trainer with --use-wandb and --wandb-project, or correct --api-addr",
        every_s=1.0,
    )


async def health(config: WatcherConfig, client: httpx.AsyncClient) -> dict[str, float]:
    """1 or 0 for each server of the node."""

    async def one(url: str) -> float:
        with contextlib.suppress(httpx.HTTPError):
            return float((await client.get(url)).status_code == 200)
        return 0.0

    return dict(zip(config.servers, await asyncio.gather(*map(one, config.servers.values())), strict=True))


async def watch(config: WatcherConfig, api: AsyncBatchingApi, client: httpx.AsyncClient, sink: WandbSink) -> None:
    """Write the health of all servers to `sink`, until cancelled."""
    step, known = 0, dict[str, float]()
    while True:
        try:
            step = (await api.call(STATUS)).current_step
        except (ApiRefused, ApiUnreachable) as reason:
            log.warning("Still at step %d, as far as known: %s does not answer (%s)", step, config.api_addr, reason)
        found = await health(config, client)
        for name in found:
            if found[name] != known.get(name):
                log.info("%s is %s", config.servers[name], "healthy" if found[name] else "not healthy")
        sink.write(found, step)
        known = found
        await asyncio.sleep(config.interval)


async def run(config: WatcherConfig) -> None:
    """Wait for the project, then watch. Raises EnvError when there is no project, or no W&B to log to."""
    token = None if config.token is None else config.token.get_secret_value()
    async with (
        contextlib.aclosing(AsyncBatchingApi(config.api_addr, token, Flags("--api-addr", "ATROPOS_API_TOKEN"))) as api,
        httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client,
    ):
        group, name = await project(config, api)
        sink = await open_wandb(f"inf_node_{config.node_num}", group, name, config.model_dump(mode="json"))
        if sink is None:
            raise EnvError("nowhere to log to; see the reason above")
        with contextlib.closing(sink):
            await watch(config, api, client, sink)


def main(argv: Sequence[str] | None = None) -> None:
    """Watch until interrupted."""
    config = load_config(WatcherConfig, argv, prog="inference-node-wandb-watcher")
    configure_logging("watcher")
    with one_line_errors("inference-node-wandb-watcher"):
        asyncio.run(run(config))


if __name__ == "__main__":
    main()
