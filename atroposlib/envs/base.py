"""The names that environments import: `BaseEnv`, which an author extends, and its companions."""

from collections.abc import Sequence

from atroposlib.envs.commands.cli import main
from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.payloads import Item, ScoredDataGroup, ScoredDataItem
from atroposlib.envs.run.environment import Environment
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline

# What APIServerConfig was called; environments still use the name.
OpenaiConfig = APIServerConfig

__all__ = [
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "OpenaiConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
]


class BaseEnv(Environment):
    """An environment server. Override `get_next_item`, `evaluate`, `collect_trajectory` or `collect_trajectories`,
    mostly `setup` too.
    """

    async def env_manager(self) -> None:
        """Serve until the last step; see `serve.py`."""
        from atroposlib.envs.commands.serve import serve  # `--help` does not need its HTTP client

        await serve(self)

    async def process_manager(self) -> None:
        """Sample `total_steps` groups into files, without an API; see `process.py`."""
        from atroposlib.envs.commands.process import process

        await process(self)

    @classmethod
    def cli(cls, argv: Sequence[str] | None = None, default_command: str | None = None) -> None:
        """Run the command line `serve | process | evaluate`; `default_command` is taken when none is named."""
        main(cls, argv, default_command)
