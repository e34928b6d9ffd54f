"""Canned replies for tests of environments."""

import pytest

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_harness import ServerHarness, create_chat_completion, create_completion
from atroposlib.envs.server_handling.server_manager import ServerManager


def harness_of(manager: ServerManager) -> ServerHarness:
    [server] = manager.servers
    assert isinstance(server, ServerHarness)
    return server


async def test_a_testing_manager_replies_what_the_harness_was_given() -> None:
    manager = ServerManager([APIServerConfig()], testing=True)
    messages = [{"role": "user", "content": "hi"}]
    harness_of(manager).set_desired_response(messages, create_chat_completion(["a", "b"]))
    harness_of(manager).set_desired_completion("once", create_completion("upon", n=2))
    chat = await manager.chat_completion(messages=messages, n=2)
    assert [choice.message.content for choice in chat.choices] == ["a", "b"]
    assert [choice.text for choice in (await manager.completion(prompt="once", n=2)).choices] == ["upon", "upon"]


async def test_keywords_are_those_of_the_ancestor_and_choices_may_end_differently() -> None:
    harness = ServerHarness()
    messages = [{"role": "user", "content": "hi"}]
    chat = create_chat_completion(resp=["a", "b"], n=2, finish_reason=["length", "tool_calls"])
    harness.set_desired_response(input_message=messages, desired_response=chat)
    harness.set_desired_completion(
        input_message="once", completion=create_completion(resp="upon", n=2, finish_reason=["stop", "length"])
    )
    reply = await harness.chat_completion(messages=messages, n=2)
    assert [(choice.message.content, choice.finish_reason) for choice in reply.choices] == [
        ("a", "length"),
        ("b", "tool_calls"),
    ]
    texts = await harness.completion(prompt="once", n=2)
    assert [(choice.text, choice.finish_reason) for choice in texts.choices] == [("upon", "stop"), ("upon", "length")]


async def test_tokens_are_found_by_text_or_by_ids() -> None:
    harness = ServerHarness()
    harness.set_tokens_and_logprobs_response("p", [1, 2], [[3], [4, 5]], [[-0.1], [-0.2, -0.3]], ["stop", "length"])
    expected = ([1, 2], [[3], [4, 5]], [[-0.1], [-0.2, -0.3]], ["stop", "length"])
    assert await harness.tokens_and_logprobs_completion(prompt="p", n=2) == expected
    assert await harness.tokens_and_logprobs_completion(input_ids=[1, 2], n=2) == expected


async def test_an_unknown_prompt_raises() -> None:
    manager = ServerManager([APIServerConfig()], testing=True)
    with pytest.raises(KeyError, match="no reply for the prompt 'user: hi'"):
        await manager.chat_completion(messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(KeyError, match="no reply for the prompt 'x'"):
        await manager.completion(prompt="x")
    with pytest.raises(KeyError, match="no reply for the prompt 'x'"):
        await manager.tokens_and_logprobs_completion(prompt="x")


def test_a_sequence_needs_a_token_and_every_token_a_log_probability() -> None:
    with pytest.raises(ValueError, match="has no tokens"):
        ServerHarness().set_tokens_and_logprobs_response("p", [1], [[]], [[]], ["stop"])
    with pytest.raises(ValueError, match="2 sampled tokens came with 1 log-probabilities"):
        ServerHarness().set_tokens_and_logprobs_response("p", [1], [[3, 4]], [[-0.1]], ["stop"])
