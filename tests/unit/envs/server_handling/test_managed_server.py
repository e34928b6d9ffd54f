"""What ManagedServer remembers: ids as sampled, over turns, in both modes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from atroposlib.envs.errors import OtherTokenizer
from atroposlib.envs.rollouts import Rollout, rollout_group
from atroposlib.envs.server_handling.managed_server import ManagedServer, ManagedServerAdapter, SequenceNode, _node
from atroposlib.envs.server_handling.sequences.sampling import SampledSequence, SampledTokens
from atroposlib.envs.server_handling.sequences.sequence_book import extended_prompt, unsampled_prompt
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.server_manager import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.groups import check
from atroposlib.testing.fake_inference_server import FakeInferenceServer, fake_experts, fake_logprob
from atroposlib.testing.tiny_tokenizer import THINK_DROPPING_CHATML, make_tiny_tokenizer
from atroposlib.wire.batching import GroupRequirements, RoutingShape

TOKENIZER = make_tiny_tokenizer([("l", "l"), ("o", "o"), ("a", "n")])
END = TOKENIZER.eos_token_id


class Setup:
    """A ManagedServer on a fake server whose replies the test chooses by prompt."""

    def __init__(self, fake: FakeInferenceServer, server: VLLMServer) -> None:
        self.fake = fake
        self.server = server

    def managed(self, **arguments: Any) -> ManagedServer:
        return ManagedServer(self.server, self.fake.tokenizer, **arguments)

    def replies(self, **by_last_message: str) -> None:
        """Answer a chat by the text of its last user message."""
        self.fake.answer = lambda prompt: by_last_message[
            prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        ]


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with FakeInferenceServer(tokenizer=TOKENIZER) as fake:
        server = VLLMServer(APIServerConfig(server_type="vllm", base_url=fake.base_url, model_name="fake"))
        yield Setup(fake, server)
        await server.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def sampled_text(node: SequenceNode) -> str:
    return str(TOKENIZER.decode([token for token in node.masked_tokens if token != -100]))


def check_node(node: SequenceNode) -> None:
    """Invariants of every node: one length, sentinels exactly where nothing was sampled."""
    assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
    for token, masked, logprob in zip(node.tokens, node.masked_tokens, node.logprobs, strict=True):
        assert (masked, logprob) == (-100, 1.0) or (masked == token and logprob <= 0)


async def test_a_reply_becomes_a_node_of_prompt_and_sampled_tokens(setup: Setup) -> None:
    setup.replies(hi="hello")
    managed = setup.managed()
    reply = await managed.chat_completion(messages=[user("hi")], max_tokens=20)
    assert reply.choices[0].message.content == "hello"
    assert reply.choices[0].finish_reason == "stop"
    prompt = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    output = [*TOKENIZER.encode("hello"), END]
    assert managed.get_state() == {
        "nodes": [
            SequenceNode(
                full_text="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello",
                tokens=prompt + output,
                masked_tokens=[-100] * len(prompt) + output,
                logprobs=[1.0] * len(prompt) + [fake_logprob(token, at) for at, token in enumerate(output)],
                metadata={"finish_reason": "stop", "policy_versions": [0, 0], "version_spans": [[0, 0]]},
            )
        ]
    }
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(output)


async def test_the_next_turn_extends_the_node_with_one_end_of_turn_token(setup: Setup) -> None:
    setup.replies(hi="hello", more="cool")
    managed = setup.managed()
    await managed.chat_completion(messages=[user("hi")], max_tokens=20)
    setup.fake.policy_version = 3
    await managed.chat_completion(messages=[user("hi"), assistant("hello"), user("more")], max_tokens=20)
    [node] = managed.current_nodes
    check_node(node)
    assert TOKENIZER.decode(node.tokens) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ncool<|im_end|>"
    )
    assert sampled_text(node) == "hello<|im_end|>cool<|im_end|>"
    second = len(node.tokens) - 1 - len(TOKENIZER.encode("cool"))
    spans = [[0, 0], [second, 3]]
    assert node.metadata == {"finish_reason": "stop", "policy_versions": [0, 3], "version_spans": spans}


async def test_the_experts_of_the_last_turn_are_those_of_the_whole_sequence(setup: Setup) -> None:
    setup.replies(hi="hello", more="cool")
    managed = setup.managed()
    shape = setup.fake.routing = RoutingShape(3, 2, 300)
    await managed.chat_completion(messages=[user("hi")], max_tokens=20)
    await managed.chat_completion(messages=[user("hi"), assistant("hello"), user("more")], max_tokens=20)
    [node] = managed.current_nodes
    assert node.metadata["routed_experts"] == fake_experts(node.tokens, shape)
    group = rollout_group([Rollout("cool", [], [node])], [1.0])
    assert group["routed_experts"] == [fake_experts(node.tokens, shape)]
    check(group, GroupRequirements(trainable_only=True, routing=shape, routing_required=True))


async def test_versions_of_tokens_are_joined_over_turns_and_unknown_with_one_that_is(setup: Setup) -> None:
    prompt = unsampled_prompt("?", [1, 2])
    first = _node(prompt, SampledSequence([5, 6, END], [-0.5] * 3, "stop", (3, 4), [(0, 3), (1, 4)]), "56")
    assert first.metadata["version_spans"] == [[0, 3], [3, 4]]
    again = extended_prompt(first.full_text + "<|im_end|>", first, TOKENIZER)
    same = _node(again, SampledSequence([7, 8], [-0.5] * 2, "stop", (4, 5), [(0, 4), (1, 5)]), "78")
    assert same.metadata == {
        "finish_reason": "stop",
        "policy_versions": [3, 5],
        "version_spans": [[0, 3], [3, 4], [6, 5]],
    }
    unknown = _node(again, SampledSequence([7], [-0.5], "stop", (4, 5)), "7")
    assert unknown.metadata["version_spans"] is None
    later = extended_prompt(unknown.full_text, unknown, TOKENIZER)
    assert _node(later, SampledSequence([7], [-0.5], "stop", (5, 5), [(0, 5)]), "7").metadata["version_spans"] is None


async def test_the_server_is_shown_the_sampled_ids_again_not_their_text_tokenised(setup: Setup) -> None:
    """The model sampled l, l where the tokenizer would write ll: the second turn must show it l, l."""
    ids = [token for letter in "hello" for token in TOKENIZER.encode(letter)]
    assert ids != TOKENIZER.encode("hello")
    harness = ServerHarness()
    managed = ManagedServer(harness, TOKENIZER)
    prompt = TOKENIZER.encode("Say: ")
    harness.set_tokens_and_logprobs_response("Say: ", prompt, [ids], [[-0.5] * 5], ["stop"])
    harness.set_tokens_and_logprobs_response("Say: hello!", prompt, [[END]], [[-0.25]], ["stop"])
    await managed.completion(prompt="Say: ")
    await managed.completion(prompt="Say: hello!")
    [node] = managed.current_nodes
    assert node.tokens == prompt + ids + TOKENIZER.encode("!") + [END]
    assert node.masked_tokens == [-100] * len(prompt) + ids + [-100, END]
    assert node.logprobs == [1.0] * len(prompt) + [-0.5] * 5 + [1.0, -0.25]


async def test_a_text_that_goes_on_after_an_end_token_leaves_that_token_out(setup: Setup) -> None:
    setup.fake.answer = lambda prompt: " world" if prompt == "hello" else " again"
    managed = setup.managed()
    first = await managed.completion(prompt="hello", max_tokens=20)
    assert first.choices[0].text == " world"
    await managed.completion(prompt="hello world! And", max_tokens=20)
    [node] = managed.current_nodes
    check_node(node)
    assert TOKENIZER.decode(node.tokens) == "hello world! And again<|im_end|>"
    assert sampled_text(node) == " world again<|im_end|>"


async def test_a_reply_cut_at_its_limit_says_so_and_its_turn_is_ended_by_the_template(setup: Setup) -> None:
    setup.replies(hi="a long reply", more="ok")
    managed = setup.managed()
    reply = await managed.chat_completion(messages=[user("hi")], max_tokens=4)
    assert reply.choices[0].finish_reason == "length"
    assert managed.current_nodes[0].metadata["finish_reason"] == "length"
    content = reply.choices[0].message.content or ""
    await managed.chat_completion(messages=[user("hi"), assistant(content), user("more")], max_tokens=20)
    [node] = managed.current_nodes
    assert sampled_text(node) == "a lo" + "ok<|im_end|>"
    assert TOKENIZER.decode(node.tokens).count("<|im_end|>") == 4


async def test_the_longest_known_text_is_extended(setup: Setup) -> None:
    setup.fake.answer = lambda prompt: ["ans1", "ans10"] if prompt == "P" else "!"
    managed = setup.managed()
    await managed.completion(prompt="P", n=2, max_tokens=20)
    await managed.completion(prompt="Pans10 more", max_tokens=20)
    assert [TOKENIZER.decode(node.tokens) for node in managed.current_nodes] == [
        "Pans1<|im_end|>",
        "Pans10 more!<|im_end|>",
    ]
    assert [sampled_text(node) for node in managed.current_nodes] == ["ans1<|im_end|>", "ans10!<|im_end|>"]


async def test_many_replies_are_many_nodes_and_an_extension_replaces_its_parent(setup: Setup) -> None:
    setup.fake.answer = lambda prompt: ["a", "b"]
    managed = setup.managed()
    await managed.chat_completion(messages=[user("x")], n=2)
    await managed.chat_completion(messages=[user("x"), assistant("a"), user("y")], n=2)
    assert [sampled_text(node) for node in managed.current_nodes] == [
        "a<|im_end|>a<|im_end|>",
        "b<|im_end|>",
        "a<|im_end|>b<|im_end|>",
    ]


async def test_another_conversation_is_another_node(setup: Setup) -> None:
    setup.replies(hi="hello", you="fine")
    managed = setup.managed()
    await managed.chat_completion(messages=[user("hi")])
    await managed.chat_completion(messages=[user("you")])
    await managed.chat_completion(messages=[user("hi"), assistant("edited"), user("you")])
    assert [sampled_text(node) for node in managed.current_nodes] == [
        "hello<|im_end|>",
        "fine<|im_end|>",
        "fine<|im_end|>",
    ]


async def test_a_tree_keeps_every_branch_with_the_turns_before_it(setup: Setup) -> None:
    setup.fake.answer = lambda prompt: ["a", "b"]
    managed = setup.managed(track_tree=True)
    await managed.chat_completion(messages=[user("x")], n=2)
    await managed.chat_completion(messages=[user("x"), assistant("a"), user("y")], n=2)
    state = managed.get_state()
    assert state["sequences"] == state["tree"]
    by_text = state["sequences"]
    assert {text: node.full_text for text, node in by_text.items()} == {text: text for text in by_text}
    assert sorted(sampled_text(node) for node in by_text.values()) == [
        "a<|im_end|>",
        "a<|im_end|>a<|im_end|>",
        "a<|im_end|>b<|im_end|>",
        "b<|im_end|>",
    ]
    for node in by_text.values():
        check_node(node)


@pytest.mark.parametrize("preserved", [True, False])
async def test_thoughts_of_earlier_turns_stay_when_preserved_and_else_follow_the_template(
    setup: Setup, preserved: bool
) -> None:
    setup.fake.tokenizer = make_tiny_tokenizer(chat_template=THINK_DROPPING_CHATML)
    setup.replies(hi="<think>hm</think>\nhello", more="ok")
    managed = setup.managed(preserve_think_blocks=preserved)
    await managed.chat_completion(messages=[user("hi")], max_tokens=40)
    await managed.chat_completion(
        messages=[user("hi"), assistant("<think>hm</think>\nhello"), user("more")], max_tokens=40
    )
    texts = [setup.fake.tokenizer.decode(node.tokens) for node in managed.current_nodes]
    if preserved:
        assert len(texts) == 1
        assert "<think>hm</think>\nhello<|im_end|>\n<|im_start|>user\nmore" in texts[0]
        assert setup.fake.tokenizer.encode("ok")[0] in managed.current_nodes[0].masked_tokens
    else:
        assert len(texts) == 2
        assert "<think>" in texts[0]
        assert "<think>" not in texts[1]


async def test_an_assistant_message_at_the_end_is_continued(setup: Setup) -> None:
    setup.fake.answer = lambda prompt: "is 4" if prompt.endswith("assistant\nThe answer ") else "no"
    managed = setup.managed()
    await managed.chat_completion(messages=[user("2+2"), assistant("The answer ")])
    [node] = managed.current_nodes
    assert TOKENIZER.decode(node.tokens).endswith("assistant\nThe answer is 4<|im_end|>")
    assert sampled_text(node) == "is 4<|im_end|>"


class LateHarness(ServerHarness):
    """Takes its time by prompt."""

    delays_s: ClassVar = {"P0": 0.1, "P1": 0.0, "P2": 0.05}

    async def request_tokens(self, arguments: dict[str, Any]) -> SampledTokens:
        await asyncio.sleep(self.delays_s[arguments["prompt"]])
        return await super().request_tokens(arguments)


async def test_concurrent_calls_keep_whole_nodes_in_the_order_of_the_calls() -> None:
    harness = LateHarness()
    for prompt in harness.delays_s:
        replies = [TOKENIZER.encode("a"), TOKENIZER.encode("b")]
        harness.set_tokens_and_logprobs_response(
            prompt, TOKENIZER.encode(prompt), replies, [[-0.5], [-0.5]], ["stop", "stop"]
        )
    managed = ManagedServer(harness, TOKENIZER)
    await asyncio.gather(*(managed.completion(prompt=prompt, n=2) for prompt in harness.delays_s))
    assert [node.full_text for node in managed.current_nodes] == ["P0a", "P0b", "P1a", "P1b", "P2a", "P2b"]
    for node in managed.current_nodes:
        check_node(node)


async def test_forks_of_one_turn_made_at_the_same_time_are_both_kept(setup: Setup) -> None:
    setup.replies(hi="hello", left="l", right="r")
    managed = setup.managed()
    await managed.chat_completion(messages=[user("hi")])
    await asyncio.gather(
        *(managed.chat_completion(messages=[user("hi"), assistant("hello"), user(turn)]) for turn in ("left", "right"))
    )
    assert sorted(sampled_text(node) for node in managed.current_nodes) == [
        "hello<|im_end|>l<|im_end|>",
        "hello<|im_end|>r<|im_end|>",
    ]


async def test_a_failed_call_leaves_the_nodes_as_they_were(setup: Setup) -> None:
    setup.replies(hi="hello", more="ok")
    managed = setup.managed()
    await managed.chat_completion(messages=[user("hi")])
    before = managed.get_state()
    setup.fake.fail_next(1, 400)
    with pytest.raises(Exception, match="replied 400"):
        await managed.chat_completion(messages=[user("hi"), assistant("hello"), user("more")])
    assert managed.get_state() == before


async def test_reset_forgets(setup: Setup) -> None:
    setup.replies(hi="hello")
    managed = setup.managed()
    await managed.chat_completion(messages=[user("hi")])
    managed.reset()
    assert managed.get_state() == {"nodes": []}


async def test_template_arguments_and_sampling_parameters_take_their_ways(setup: Setup) -> None:
    setup.fake.tokenizer = make_tiny_tokenizer(chat_template="{{ mode }}:{{ messages[0]['content'] }}")
    managed = setup.managed()
    body = {"chat_template_kwargs": {"mode": "terse"}, "top_k": 5}
    await managed.chat_completion(messages=[user("hi")], extra_body=body, temperature=None, model="any", top_p=0.5)
    sent = setup.fake.requests[-1][1]
    assert setup.fake.tokenizer.decode(sent.pop("prompt")["prompt_token_ids"]) == "terse:hi"
    assert sent == {"logprobs": 0, "n": 1, "top_k": 5, "top_p": 0.5}


async def test_tools_are_shown_to_the_model_whatever_the_choice(setup: Setup) -> None:
    setup.fake.tokenizer = make_tiny_tokenizer(chat_template="{{ tools | length if tools else 0 }}")
    managed = setup.managed()
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for choice, shown in (("auto", "1"), ("none", "1"), (None, "1")):
        await managed.chat_completion(messages=[user("hi")], tools=[tool], tool_choice=choice)
        assert managed.current_nodes[-1].full_text.startswith(shown)
    with pytest.raises(ValueError, match="tool_choice 'sometimes' is not supported"):
        await managed.chat_completion(messages=[user("hi")], tools=[tool], tool_choice="sometimes")


async def test_prompt_logprobs_of_a_conversation(setup: Setup) -> None:
    scored = await setup.managed().get_logprobs(messages=[user("hi")], top_k=1)
    assert TOKENIZER.decode(scored["prompt_tokens"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="exactly one of"):
        await setup.managed().get_logprobs()


async def test_the_adapter_looks_like_the_sdk(setup: Setup) -> None:
    setup.replies(hi="hello")
    managed = setup.managed()
    client = ManagedServerAdapter(managed, base_url="http://x/v1")
    reply = await client.chat.completions.create(model="any", messages=[user("hi")])
    assert reply.choices[0].message.content == "hello"
    assert len(managed.current_nodes) == 1
    assert client.base_url == "http://x/v1"
    with pytest.raises(NotImplementedError):
        client.copy()
    with pytest.raises(NotImplementedError):
        await client.post("/x")


def test_an_unknown_tool_parser_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="tool_parser 'hermis' is not known; did you mean 'hermes'"):
        ManagedServer(ServerHarness(), TOKENIZER, tool_parser="hermis")


async def test_streaming_is_refused_in_words(setup: Setup) -> None:
    with pytest.raises(ValueError, match="stream=True is not supported"):
        await setup.managed().chat_completion(messages=[user("hi")], stream=True)


async def test_a_conversation_without_messages_is_refused(setup: Setup) -> None:
    with pytest.raises(ValueError, match="at least one message"):
        await setup.managed().chat_completion(messages=[])


async def test_text_parts_and_objects_of_the_sdk_are_messages(setup: Setup) -> None:
    setup.replies(hi="one", more="two")
    managed = setup.managed()
    parts = [{"type": "text", "text": "hi"}]
    first = await managed.chat_completion(messages=[{"role": "user", "content": parts}])
    await managed.chat_completion(messages=[user("hi"), first.choices[0].message, user("more")])
    (node,) = managed.current_nodes
    assert node.full_text.count("one") == 1
    joined = managed.render([{"role": "user", "content": [*parts, {"type": "input_text", "text": "there"}, "you"]}])
    assert "user\nhi\nthere\nyou<|im_end|>" in joined


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "part of type 'image_url'"),
        ({"role": "user", "content": 7}, "content is 7: expected text"),
        ({"content": "hi"}, "expected a mapping with role"),
        ("hi", "expected a mapping with role"),
    ],
)
async def test_content_that_is_not_text_is_refused_with_its_place(setup: Setup, message: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"messages\[1\].*{reason}"):
        await setup.managed().chat_completion(messages=[user("hi"), message])


async def test_tools_that_the_template_does_not_show_stand_in_the_system_prompt(setup: Setup) -> None:
    setup.fake.answer = lambda prompt: "Well."
    managed = setup.managed(tool_parser="hermes")
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    await managed.chat_completion(messages=[user("hi")], tools=[tool])
    await managed.chat_completion(messages=[user("hi"), assistant("Well."), user("more")], tools=[tool])
    (node,) = managed.current_nodes
    assert node.full_text.count('"name": "search"') == 1
    assert node.full_text.startswith("<|im_start|>system\n# Tools")


async def test_stop_takes_token_ids_and_arguments_of_the_sdk_change_nothing(setup: Setup) -> None:
    await setup.managed().chat_completion(
        messages=[user("hi")], stop=[END, "\n\n"], user="me", timeout=5, extra_headers={"X": "y"}, store=False
    )
    _, body = setup.fake.requests[-1]
    assert (body["stop_token_ids"], body["stop"]) == ([END], ["\n\n"])
    assert not {"user", "timeout", "extra_headers", "store"} & body.keys()
    with pytest.raises(ValueError, match=r"stop has 1.5: expected texts and token ids"):
        await setup.managed().chat_completion(messages=[user("hi")], stop=[1.5])


async def test_logprobs_of_a_reply_are_those_of_its_tokens(setup: Setup) -> None:
    managed = setup.managed()
    reply = await managed.chat_completion(messages=[user("hi")], logprobs=True)
    shown = reply.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    (node,) = managed.current_nodes
    assert [each.logprob for each in shown.content] == [value for value in node.logprobs if value != 1.0]
    with pytest.raises(ValueError, match="top_logprobs is not supported"):
        await managed.chat_completion(messages=[user("hi")], logprobs=True, top_logprobs=5)


async def test_another_tokenizer_than_the_servers_ends_the_run_in_one_line(setup: Setup) -> None:
    await setup.server.compare_tokenizer(TOKENIZER)
    other = VLLMServer(APIServerConfig(server_type="vllm", base_url=setup.fake.base_url, model_name="fake"))
    try:
        with pytest.raises(OtherTokenizer, match=r"token \d+ of a test text is \d+ there and \d+ here.*tokenizer_name"):
            await other.compare_tokenizer(make_tiny_tokenizer([("e", "s")]))
    finally:
        await other.close()
