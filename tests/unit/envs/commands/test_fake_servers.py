"""What an environment tells a fake inference server, and that it tells nothing to any other."""

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.commands import cli
from atroposlib.envs.commands.process import process
from atroposlib.envs.errors import EnvError
from atroposlib.testing.fake_answers import InTurn, Right
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.utils.tokenizers import load_tokenizer
from environments.template_server import LargerNumberEnv
from environments.two_turn_template_server import GuessEnv
from tests.unit.envs.fakes import renumbered_tokenizer


def tree(env_cls: type[BaseEnv], folder: Path, server: FakeInferenceServer, command: str = "process") -> Any:
    flags: dict[str, object] = {
        "env.tokenizer_name": renumbered_tokenizer(folder / "tokenizer"),
        "openai.base_url": server.base_url,
    }
    flags |= {"env.data_path_to_save_groups": folder / "groups.jsonl", "env.total_steps": 4}
    flags |= {"openai.model_name": "fake", "openai.server_type": "vllm"}
    return cli.load_tree(env_cls, command, [f"--{name}={value}" for name, value in flags.items()], "test")


async def processed(env_cls: type[BaseEnv], folder: Path, server: FakeInferenceServer) -> list[dict[str, Any]]:
    await process(cli.build(env_cls, tree(env_cls, folder, server)))
    return [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("env_cls", [LargerNumberEnv, GuessEnv])
async def test_process_shows_right_and_wrong_answers_whatever_the_tokenizer(
    env_cls: type[BaseEnv], tmp_path: Path
) -> None:
    async with FakeInferenceServer(Right(0.5, InTurn(["No idea."]), text="It is REFERENCE.")) as server:
        groups = await processed(env_cls, tmp_path, server)
    assert len(groups) == 4
    for group in groups:
        assert sorted(set(group["scores"])) == [0.0, 1.0]
        for messages, score in zip(group["messages"], group["scores"], strict=True):
            assert messages[-1]["content"].startswith("It is ") if score else messages[-1]["content"] == "No idea."


async def test_evaluate_tells_the_tokenizer_alone(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: "It is 99.") as server:
        await cli.run(LargerNumberEnv, "evaluate", tree(LargerNumberEnv, tmp_path, server, "evaluate"))
        prompts = [server.tokenizer.decode(body["prompt"]["prompt_token_ids"]) for _, body in server.requests]
    assert len(prompts) == 64
    assert all("Which number is larger" in prompt for prompt in prompts)


async def test_right_answers_are_for_process_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeInferenceServer(Right(0.5, InTurn(["no"]))) as server:
        assert await cli.run(LargerNumberEnv, "evaluate", tree(LargerNumberEnv, tmp_path, server, "evaluate")) == 1
    assert "was started with --right, which answers `process` alone" in caplog.text


async def test_an_environment_without_reference_answers_is_told_so_at_once(tmp_path: Path) -> None:
    class NoReference(LargerNumberEnv):
        def reference_answer(self, item: list[int]) -> None:  # type: ignore[override]
            return None

    async with FakeInferenceServer(Right(0.5, InTurn(["no"]))) as server:
        with pytest.raises(EnvError, match=r"NoReference has no reference answer.*start it with --answer or --random"):
            await processed(NoReference, tmp_path, server)
        assert server.requests == []


async def test_a_reference_answer_that_fails_is_not_called_missing(tmp_path: Path) -> None:
    class Raising(LargerNumberEnv):
        def reference_answer(self, item: list[int]) -> str:
            raise KeyError("largest")

    async with FakeInferenceServer(Right(0.5, InTurn(["no"]))) as server:
        with pytest.raises(
            EnvError, match=r"could not give .*: KeyError: 'largest' at .* in reference_answer: correct"
        ):
            await processed(Raising, tmp_path, server)


async def test_a_tokenizer_that_the_server_cannot_load_ends_the_command(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        env = cli.build(LargerNumberEnv, tree(LargerNumberEnv, tmp_path, server))
        env.config.tokenizer_name = "none/such/at/all"
        with pytest.raises(EnvError, match=r"/fake replied 400: .*none/such/at/all"):
            await process(env)


async def test_a_server_that_is_not_a_fake_one_is_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.testing.fake_inference_server.FAKE", "vllm")
    tokenizer = load_tokenizer(str(renumbered_tokenizer(tmp_path / "tokenizer")))
    async with FakeInferenceServer(lambda prompt: "It is 1.", tokenizer) as server:
        await processed(LargerNumberEnv, tmp_path, server)
        assert server.hits["/fake"] == 0
        assert server.hits["/v1/models"] == 2  # for its kind, and for the length of its context
