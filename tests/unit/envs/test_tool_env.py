"""Conversations with tools: what the model is shown, what is run, trained on, counted, and bounded."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.errors import EnvError
from atroposlib.envs.evaluation.evaluation import EvaluationFailed
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.payloads import Item
from atroposlib.envs.tool_env import ToolEnv, ToolEnvConfig
from atroposlib.envs.tools import BadTool, ToolLike
from atroposlib.testing.fake_inference_server import FakeInferenceServer, fake_logprob
from atroposlib.testing.tiny_tokenizer import CHATML, THINK_DROPPING_CHATML, save_tiny_tokenizer
from atroposlib.type_definitions import Messages
from tests.unit.environments.support import running_env, sampled_texts

TOOL_CHATML = "{% if tools %}TOOLS {{ tools | length }} {{ tools[0]['function']['name'] }}\n{% endif %}" + CHATML


def square(number: float) -> float:
    """Squares a number."""
    return number**2


async def breaks() -> None:
    """Breaks."""
    raise ZeroDivisionError("of the author's")


class SquareEnv(ToolEnv):
    """A question is a number to square."""

    name = "square"
    tools: ClassVar[Sequence[ToolLike]] = (square, breaks)

    async def setup(self) -> None:
        """One question."""
        self.held_out = [3]

    async def training_item(self, number: int) -> int:
        """The number."""
        return number

    def prompt(self, item: int) -> Messages:
        """The question."""
        return [{"role": "user", "content": f"What is {item} squared?"}]

    async def score(self, item: int, answer: str, state: dict[str, Any]) -> float:
        """One for the right number."""
        return float(answer == f"It is {item**2}.0.")


class Sink:
    """Keeps the last metrics."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def write(self, metrics: dict[str, Any], step: int) -> None:
        """Keep them."""
        self.kept.update(metrics)

    def close(self) -> None:
        """Nothing is open."""


def call(name: str = "square", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def turns(*said: str) -> Callable[[str], str]:
    """A model that says these one after the other, counted by the assistant turns that its prompt opens."""
    return lambda prompt: said[min(prompt.count("<|im_start|>assistant"), len(said)) - 1]


def with_template(folder: Path, template: str) -> dict[str, Any]:
    return {"tokenizer_name": str(save_tiny_tokenizer(folder / "templated", chat_template=template))}


SETTINGS: dict[str, Any] = {"max_new_tokens": 200, "max_token_length": 4000}


async def group_of(env: ToolEnv, item: Item = 3) -> Any:
    """A group of conversations."""
    return (await env.collect_trajectories(item))[0]


async def converse(env: ToolEnv, item: Item = 3) -> Any:
    return (await env.rollouts(item, 1, "train", 1.0, 1.0))[0]


async def test_calls_are_run_and_only_what_the_model_wrote_is_trained_on(tmp_path: Path) -> None:
    first = f"Let me see. {call(number=3)}"
    async with (
        FakeInferenceServer(turns(first, "It is 9.0."), policy_version=2) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS, **with_template(tmp_path, TOOL_CHATML)) as env,
    ):
        group = await group_of(env)
        text = env.tokenizer.decode(group["tokens"][0])
    assert text.startswith("TOOLS 2 square\n<|im_start|>user\nWhat is 3 squared?<|im_end|>")
    assert "<|im_start|>tool\n9.0<|im_end|>" in text
    assert sampled_texts(group) == [f"{first}<|im_end|>It is 9.0.<|im_end|>"] * 4
    assert group["scores"] == [1.0] * 4
    assert group["policy_versions"] == [[2, 2]] * 4
    for mask, logprobs in zip(group["masks"], group["inference_logprobs"], strict=True):
        assert [value == 1.0 for value in logprobs] == [token == -100 for token in mask]
        sampled = [token for token in mask if token != -100]
        turn = sampled.index(env.tokenizer.eos_token_id) + 1
        expected = [fake_logprob(token, place) for place, token in enumerate(sampled[:turn])]
        expected += [fake_logprob(token, place) for place, token in enumerate(sampled[turn:])]
        assert [value for value in logprobs if value != 1.0] == expected
    messages = group["messages"][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "Let me see."
    made = messages[1]["tool_calls"][0]
    assert messages[2] == {"role": "tool", "tool_call_id": made["id"], "name": "square", "content": "9.0"}


async def test_a_template_that_shows_no_tools_gets_them_in_the_system_prompt(tmp_path: Path) -> None:
    class SystemEnv(SquareEnv):
        def prompt(self, item: int) -> Messages:
            return [{"role": "system", "content": "Be brief."}, *super().prompt(item)]

    async with FakeInferenceServer(turns("It is 9.0.")) as server:
        for env_class, start in ((SquareEnv, "# Tools"), (SystemEnv, "Be brief.\n\n# Tools")):
            async with running_env(env_class, tmp_path, server, **SETTINGS) as env:
                rollout = await converse(env)
            prompt = rollout.sequences[0].full_text
            assert prompt.index(start) < prompt.index("What is 3 squared?")
            assert '{"type": "function", "function": {"name": "square", "description"' in prompt
            assert prompt.count("# Tools") == 1


async def test_each_mistake_is_told_to_the_model_and_counted(tmp_path: Path) -> None:
    said = [
        call("sqare", number=1),
        call(number="x"),
        call("breaks"),
        "<tool_call>{square 3}</tool_call>",
        call(number=3) + call(number=4),
        "It is 9.0.",
    ]
    async with (
        FakeInferenceServer(turns(*said)) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS) as env,
    ):
        rollout = await converse(env)
        await converse(env)
        metrics: dict[str, Any] = {}
        env._env_run.sinks.append(cast(Any, Sink(metrics)))
        await env.wandb_log()
    replies = [message["content"] for message in rollout.messages if message["role"] in ("tool", "user")][1:]
    assert "there is no tool 'sqare'; did you mean 'square'?" in replies[0]
    assert "number: Input should be a valid number" in replies[1]
    assert replies[2] == "Error: breaks failed: ZeroDivisionError: of the author's"
    assert "the tool call could not be read" in replies[3]
    assert replies[4:] == ["9.0", "16.0"]
    assert {key: rollout.state[key] for key in ("tool_calls", "tool_errors")} == {"tool_calls": 5, "tool_errors": 4}
    assert [result.value for result in rollout.state["last_results"]] == [9.0, 16.0]
    assert metrics["square_train/tool_calls"] == 5.0
    assert metrics["square_train/tool_errors"] == 4.0


async def test_what_a_tool_raises_is_logged_once_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        FakeInferenceServer(turns(call("breaks"), call("breaks"), "No.")) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS) as env,
    ):
        await converse(env)
    told = [record.getMessage() for record in caplog.records if "Tool breaks failed" in record.getMessage()]
    assert len(told) == 1
    assert "test_tool_env.py:" in told[0]
    assert "in breaks" in told[0]


async def test_turns_are_bounded_and_the_calls_of_the_last_one_are_run(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(turns(call(number=2))) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS, max_turns=3) as env,
    ):
        rollout = await converse(env)
    assert [message["role"] for message in rollout.messages[1:]] == ["assistant", "tool"] * 3
    assert rollout.state["tool_calls"] == 3
    assert rollout.text == ""


async def test_the_default_of_max_token_length_cuts_no_conversation(tmp_path: Path) -> None:
    """It is a weight at the API; a limit is what somebody gives, or what the server and the trainer take."""
    settings = {name: value for name, value in SETTINGS.items() if name != "max_token_length"} | {
        "max_new_tokens": 9000
    }
    async with FakeInferenceServer(turns("12")) as server, running_env(SquareEnv, tmp_path, server, **settings) as env:
        await converse(env)
        assert server.requests[-1][1]["max_tokens"] == 9000
        env._env_run.context_tokens = 4000
        await converse(env)
        assert 3000 < server.requests[-1][1]["max_tokens"] < 4000


async def test_a_conversation_ends_below_max_token_length(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(turns(call(number=2))) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS | {"max_token_length": 1500}, max_turns=99) as env,
    ):
        rollout = await converse(env)
        assert max(len(node.tokens) for node in rollout.sequences) <= 1500
        assert sum(message["role"] == "assistant" for message in rollout.messages) > 2
        assert server.requests[-1][1]["max_tokens"] < 200
        env.max_token_len = 1000  # the trainer's
        assert max(len(node.tokens) for node in (await converse(env)).sequences) <= 1000
        env.max_token_len = 100
        with pytest.raises(RolloutFailed, match=r"reaches 100 tokens, the trainer's --seq-len: raise that"):
            await converse(env)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "answer",
    [
        call(number=3) * 3000,
        "<tool_call>" * 20_000,
        "<tool_call>" + '{"name": "square", "arguments": ' + "[" * 50_000,
        '<tool_call>{"name": "square", "arguments": {"number": ' + "9" * 50_000 + "}}</tool_call>",
        '<tool_call>{"name": "' + "x" * 50_000 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "square", "arguments": "' + "x" * 50_000 + '"}</tool_call>',
        '<tool_call>[[[{"name": "square"}, 1, null, {"name": 3}]]]</tool_call>',
        "<tool_call>" + "{" * 50_000 + "</tool_call>",
    ],
    ids=["thousands", "opened", "deep", "digits", "name", "arguments", "lists", "braces"],
)
async def test_hostile_answers_are_answered_within_bounds(answer: str, tmp_path: Path) -> None:
    fields = {"max_new_tokens": 500_000, "max_token_length": -1, "max_turns": 2, "max_tool_calls": 5}
    async with (
        FakeInferenceServer(turns(answer, "Done.")) as server,
        running_env(SquareEnv, tmp_path, server, **fields) as env,
    ):
        rollout = await converse(env)
    assert rollout.text == "Done."
    replies = [message for message in rollout.messages[2:-1] if message["role"] in ("tool", "user")]
    assert 1 <= len(replies) <= 5
    assert sum(len(message["content"]) for message in replies) < 5000
    assert rollout.state["tool_errors"] >= 1
    assert len(rollout.sequences) == 1


async def test_further_calls_than_the_limit_are_not_made_and_the_model_is_told(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(turns(call(number=2) * 4, "Done.")) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS | {"max_new_tokens": 400}, max_tool_calls=2) as env,
    ):
        rollout = await converse(env)
    replies = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert replies == ["4.0", "4.0\nError: 4 calls in one message; only the first 2 were made"]
    assert rollout.state["tool_calls"] == 2
    assert len(rollout.sequences) == 1


async def test_thoughts_that_the_template_drops_make_several_sequences_and_calls_in_them_are_not_made(
    tmp_path: Path,
) -> None:
    said = [f"<think>Perhaps {call('breaks')}</think>{call(number=3)}", "<think>Good.</think>It is 9.0."]
    async with (
        FakeInferenceServer(turns(*said)) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS, **with_template(tmp_path, THINK_DROPPING_CHATML)) as env,
    ):
        group = await group_of(env)
        rollout = await converse(env)
    assert rollout.state["tool_errors"] == 0
    assert sampled_texts(group) == [f"{said[0]}<|im_end|>", f"{said[1]}<|im_end|>"] * 4
    assert group["rollouts"] == [0, 0, 1, 1, 2, 2, 3, 3]


async def test_tools_of_one_rollout_have_a_state_that_score_reads(tmp_path: Path) -> None:
    class ShopEnv(SquareEnv):
        tools = ()

        def tools_for(self, item: int, state: dict[str, Any]) -> Sequence[ToolLike]:
            state["bought"] = []

            def buy(thing: str) -> str:
                """Buys something."""
                state["bought"].append(thing)
                return f"{len(state['bought'])} things"

            return [buy]

        async def score(self, item: int, answer: str, state: dict[str, Any]) -> float:
            return float(len(state["bought"]))

    async with (
        FakeInferenceServer(turns(call("buy", thing="a"), call("buy", thing="b"), "Done.")) as server,
        running_env(ShopEnv, tmp_path, server, **SETTINGS) as env,
    ):
        group = await group_of(env)
    assert group["scores"] == [2.0] * 4


async def test_a_tool_that_fails_the_rollout_fails_that_one_alone(tmp_path: Path) -> None:
    asked: list[int] = []

    def fetch() -> str:
        """Fetches."""
        asked.append(1)
        if len(asked) == 1:
            raise RolloutFailed("the shop is gone")
        return "fetched"

    class FetchEnv(SquareEnv):
        tools = (fetch,)

    async with (
        FakeInferenceServer(turns(call("fetch"), "It is 9.0.")) as server,
        running_env(FetchEnv, tmp_path, server, **SETTINGS) as env,
    ):
        group = await group_of(env)
        assert (group["scores"], group["failed"]) == ([1.0] * 3, {"infrastructure": 1})
        asked.clear()
        with pytest.raises(EvaluationFailed, match=r"^1 of 1 held-out questions have no score") as failed:
            await env.evaluate()
    assert failed.value.metrics["unscored_infrastructure"] == 1


async def test_a_second_call_that_is_cut_is_told_beside_the_result_of_the_first(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(turns(call(number=2) + '<tool_call>{"name": "squ', "Done.")) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS) as env,
    ):
        rollout = await converse(env)
    (told,) = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert told.startswith("4.0\nError: the tool call could not be read")
    assert told.endswith("(1 more in that message)")
    assert (rollout.state["tool_calls"], rollout.state["tool_errors"]) == (1, 1)


async def test_results_in_the_users_role_are_one_message(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(turns(call(number=1) + call(number=2), "Done.")) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS, tool_role="user") as env,
    ):
        rollout = await converse(env)
    assert [(message["role"], message["content"]) for message in rollout.messages[2:]] == [
        ("user", "1.0\n4.0"),
        ("assistant", "Done."),
    ]


async def test_a_cut_reply_ends_the_conversation_and_nothing_is_asked_again(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(turns("<tool_call>" + "x" * 300, "Done.")) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS) as env,
    ):
        rollout = await converse(env)
    assert len(rollout.messages) == 2
    assert rollout.state["tool_errors"] == 0


def make(env_class: type[ToolEnv], folder: Path, **fields: Any) -> ToolEnv:
    config = ToolEnvConfig(tokenizer_name=str(save_tiny_tokenizer(folder / "tokenizer")), **fields)
    return env_class(config, [APIServerConfig(server_type="vllm", base_url="http://127.0.0.1:9/v1")])


async def test_what_is_wrong_with_an_environment_is_told_at_once_in_one_line(tmp_path: Path) -> None:
    class NamelessEnv(SquareEnv):
        tools = (lambda x: x,)

    class PrefilledEnv(SquareEnv):
        def prompt(self, item: int) -> Messages:
            return [*super().prompt(item), {"role": "assistant", "content": "It"}]

    with pytest.raises(EnvError, match=r"--env.tool_parser 'hermess' is not known; did you mean 'hermes'"):
        make(SquareEnv, tmp_path, tool_parser="hermess")
    with pytest.raises(BadTool, match="a tool needs a name"):
        make(NamelessEnv, tmp_path)
    for alone in (square, "square"):
        with pytest.raises(BadTool, match=r"tools gives 'square' instead of a list: write \[f\], or \(f,\)"):
            make(type("OneEnv", (SquareEnv,), {"tools": alone}), tmp_path)
    async with FakeInferenceServer() as server, running_env(PrefilledEnv, tmp_path, server) as env:
        with pytest.raises(EnvError, match="end it with the user's"):
            await env.collect_trajectories(3)
    one = type("OneEnv", (SquareEnv,), {"tools_for": lambda self, item, state: square})
    async with FakeInferenceServer() as server, running_env(one, tmp_path, server) as env:
        with pytest.raises(BadTool, match="tools_for gives 'square' instead of a list"):
            await env.collect_trajectories(3)


async def test_a_server_of_text_is_given_the_tools_themselves(tmp_path: Path) -> None:
    async with FakeInferenceServer(turns(call(number=3), "It is 9.0.")) as server:
        config = ToolEnvConfig(tokenizer_name="none", max_new_tokens=200)
        env = SquareEnv(config, [APIServerConfig(server_type="openai", base_url=server.base_url, model_name="fake")])
        env.server.allows_text_only = True
        async with env._env_run:
            await env.setup()
            metrics = await env.evaluate()
        bodies = [body for path, body in server.requests if path == "/v1/chat/completions"]
    assert metrics["accuracy"] == 1.0
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["square", "breaks"]
    assert bodies[0]["messages"] == [{"role": "user", "content": "What is 3 squared?"}]
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "tool"]
    assert bodies[1]["messages"][2]["content"] == "9.0"
