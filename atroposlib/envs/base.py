"""The names that environments import. The code stands in the modules beside this one."""

from atroposlib.envs.base_env import BaseEnv
from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.payloads import Item, ScoredDataGroup, ScoredDataItem
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
