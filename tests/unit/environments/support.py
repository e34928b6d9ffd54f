"""What tests of single environments stand on: an environment over a fake inference server."""

import contextlib
import importlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

from atroposlib.envs.authors.author_checks import settled
from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer, save_tiny_tokenizer

E = TypeVar("E", bound=BaseEnv)


@contextlib.asynccontextmanager
async def running_env(env_class: type[E], folder: Path, server: FakeInferenceServer, **fields: Any) -> AsyncIterator[E]:
    """`env_class`, set up, in groups of four."""
    settings: dict[str, Any] = {"group_size": 4, "heldout_size": 4, "use_wandb": False, "max_new_tokens": 64}
    config = env_class.env_config_cls(
        **settings | {"tokenizer_name": str(save_tiny_tokenizer(folder / "tokenizer"))} | fields
    )
    env = env_class(config, [APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="fake")])
    async with env._env_run:
        await settled(env.setup())
        yield env


def sampled_texts(group: Any) -> list[str]:
    """The text of the tokens that are trained on, one a sequence."""
    tokenizer = make_tiny_tokenizer()
    return [tokenizer.decode([token for token in mask if token != -100]) for mask in group["masks"]]


def env_class(module: str) -> type[BaseEnv]:
    """The environment that a server's module defines."""
    classes = [
        value for value in vars(importlib.import_module(f"environments.{module}")).values() if isinstance(value, type)
    ]
    return next(each for each in classes if issubclass(each, BaseEnv) and each.__module__ == f"environments.{module}")
