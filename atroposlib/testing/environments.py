"""An environment over a fake inference server, for its author's tests: no model, no second process.

(group,) = groups(MyEnv, tmp_path, right=0.5)
assert set(group["scores"]) == {0.0, 1.0}
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.commands.cli import build, load_tree
from atroposlib.envs.commands.process import process
from atroposlib.testing.fake_answers import NO_ANSWER, REFERENCE, InTurn, Right
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer


def groups(
    env_cls: type[BaseEnv],
    directory: Path,
    *,
    right: float,
    right_answer: str = REFERENCE,
    wrong_answers: Sequence[str] = (NO_ANSWER,),
    count: int = 1,
    **settings: object,
) -> list[dict[str, object]]:
    """Return what the `process` command of `env_cls` writes to `directory`: `count` groups with `scores` and
    `messages`.

    The share `right` of the answers is `right_answer`, with the environment's reference answer for REFERENCE; the
    others are `wrong_answers`, in turn. `settings` are those of the environment: `group_size=8`. Raises EnvError where
    the command would end with one.
    """
    flags = {
        "env.tokenizer_name": save_tiny_tokenizer(directory / "tokenizer"),
        "env.data_path_to_save_groups": directory / "groups.jsonl",
        "env.total_steps": count,
        "openai.server_type": "vllm",
        "openai.model_name": "fake",
        **{f"env.{name}": value for name, value in settings.items()},
    }
    answer = Right(right, InTurn(wrong_answers), text=right_answer)
    asyncio.run(_process(env_cls, [f"--{name}={value}" for name, value in flags.items()], answer))
    return [json.loads(line) for line in (directory / "groups.jsonl").read_text().splitlines()]


async def _process(env_cls: type[BaseEnv], flags: Sequence[str], answer: Right) -> None:
    async with FakeInferenceServer(answer) as server:
        tree = load_tree(env_cls, "process", [*flags, f"--openai.base_url={server.base_url}"], env_cls.__name__)
        await process(build(env_cls, tree))
