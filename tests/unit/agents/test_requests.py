"""What the endpoint replies to requests that the real APIs refuse, and to the forms that they know."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest

from atroposlib.agents.dialects import responses
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.testing.tiny_tokenizer import CHATML, make_tiny_tokenizer
from tests.unit.agents.support import PARAMETERS, running
from tests.unit.hostile_answers.hostile import assert_linear
from tests.waiting import until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [HI]},
    RESPONSES: {"model": "fake", "input": [HI]},
    MESSAGES: {"model": "fake", "max_tokens": 9, "messages": [HI]},
}
PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}
FLAT = {"type": "function", "name": "search"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}

USED = {"type": "tool_use", "id": "1", "name": "search"}


def called(arguments: object) -> dict[str, Any]:
    function = {"name": "search", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def kind_of(path: str, reply: httpx.Response) -> str:
    """The error's type, once its form is that of the API."""
    body = reply.json()
    if path == MESSAGES:
        assert body["type"] == "error"
        return str(body["error"]["type"])
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["code"] or body["error"]["type"])


@pytest.mark.parametrize("path", BODIES)
async def test_errors_have_the_form_of_the_api_that_was_called(path: str) -> None:
    is_messages = path == MESSAGES
    async with running(token="secret", body_bytes=4000) as started:
        started.http.headers["Authorization"] = "Bearer secret"
        session, key = await started.session()
        _, other = await started.session()
        started.http.headers.pop("Authorization")
        body = BODIES[path]
        for headers, status, kind in (
            ({"x_api_key": "wrong"}, 401, "authentication_error" if is_messages else "invalid_api_key"),
            ({}, 401, "authentication_error" if is_messages else "invalid_api_key"),
            ({"authorization": "Bearer secret", "x_session_id": "none"}, 404, None),
            ({"x_api_key": other, "x_session_id": session}, 403, None),
        ):
            reply = await started.post(path, body, **headers)
            assert reply.status_code == status, reply.text
            assert kind is None or kind_of(path, reply) == kind
        malformed = "invalid_request_error"
        for wrong, status, kind in (
            ('{"messages": [', 400, malformed),
            ("[" * 3000, 400, malformed),
            ("[]", 400, malformed),
            ('{"temperature": NaN}', 400, malformed),
            ('{"temperature": 1e999}', 400, malformed),
            (json.dumps(body | {"user": "half of a \ud83d face"}), 400, malformed),
            ('{"a":' * 500 + "1" + "}" * 500, 400, malformed),
            (" " * 5000, 413, "request_too_large"),
            (body | {"model": "gpt-9"}, 404, "not_found_error" if is_messages else "model_not_found"),
            (body | {"nonsense": 1}, 400, malformed),
            (body | {"temperature": "hot"}, 400, malformed),
        ):
            reply = await started.post(path, wrong, x_api_key=key)
            assert (reply.status_code, kind_of(path, reply)) == (status, kind), reply.text
            assert status != 404 or "--also-model '*' takes any name" in reply.text
        unmounted = await started.post(path.removeprefix("/v1"), body, x_api_key=key)
        assert unmounted.status_code == 404
        assert "an OpenAI base URL ends in /v1, an Anthropic one does not" in unmounted.text
        assert (await started.post(path, body, x_api_key=key)).status_code == 200
        assert (await started.http.get(f"/sessions/{session}/nodes", headers={"x-api-key": key})).status_code == 401


@pytest.mark.parametrize("path", BODIES)
async def test_who_has_no_key_has_no_body_read(path: str) -> None:
    async with running(token="secret", body_bytes=4000) as started:
        for body in (" " * 5000, '{"messages": ['):
            for headers in ({"x_api_key": "wrong"}, {"x_session_id": "any"}):
                reply = await started.post(path, body, **headers)
                assert reply.status_code == 401, reply.text
                assert kind_of(path, reply) in ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize("path", BODIES)
async def test_bodies_that_are_read_together_have_a_limit_and_who_waits_is_served(path: str) -> None:
    async with running(body_bytes=4000, bodies=1) as started:
        _, key = await started.session()
        body = json.dumps(BODIES[path] | {"metadata": {"k": "x" * 2500}})
        may_end, has_begun = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:2000].encode()
            has_begun.set()
            await may_end.wait()
            yield body[2000:].encode()

        slow = asyncio.create_task(started.http.post(path, content=slowly(), headers={"x-api-key": key}))
        await has_begun.wait()

        async def is_refused() -> bool:
            refused = await started.post(path, body, x_api_key=key)
            if refused.status_code == 200:  # the other one was not read yet
                return False
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), refused.text
            assert kind_of(path, refused) in ("api_error", "server_error")
            return True

        await until(is_refused)
        may_end.set()
        assert (await slow).status_code == 200
        assert (await started.post(path, body, x_api_key=key)).status_code == 200


async def test_slow_bodies_of_one_key_keep_no_other_out() -> None:
    async with running(body_bytes=4000, bodies=4) as started:
        _, key = await started.session()
        _, others_key = await started.session()
        body = json.dumps(BODIES[CHAT] | {"metadata": {"k": "x" * 2500}})
        may_end = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:-1].encode()
            await may_end.wait()
            yield body[-1:].encode()

        headers = {"x-api-key": key}
        slow = [asyncio.create_task(started.http.post(CHAT, content=slowly(), headers=headers)) for _ in range(6)]
        await asyncio.sleep(0.5)  # until what they have sent is read
        assert (await started.post(CHAT, body, x_api_key=others_key)).status_code == 200
        may_end.set()
        answered = await asyncio.gather(*slow, return_exceptions=True)  # those that are refused are also hung up on
        assert [each.status_code for each in answered if isinstance(each, httpx.Response)].count(200) == 1


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (CHAT, {"messages": []}, "messages is empty"),
        (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, "image_url"),
        (CHAT, {"messages": [{"role": "king", "content": ""}]}, "king"),
        (CHAT, {"messages": ["hi"]}, "expected an object"),
        (CHAT, {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": 1}]}]}, "a function with a name"),
        (CHAT, {"messages": [HI, called(["cats"])]}, "arguments is ['cats']"),
        (CHAT, {"messages": [HI, called(7)]}, "arguments is 7"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "search", "arguments": 7}]}, "arguments is 7"),
        (MESSAGES, {"messages": [HI, {"role": "assistant", "content": [USED | {"input": "cats"}]}]}, "input is 'cats'"),
        (CHAT, {"tools": [{"type": "function"}]}, "no name"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]}, "'x'"),
        (CHAT, {"tool_choice": 4}, "tool_choice"),
        (CHAT, {"n": 0}, "at least 1"),
        (CHAT, {"stop": [1]}, "stop"),
        (CHAT, {"response_format": {"type": "json_object"}}, "json_object"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"top_k": []}, "top_k"),
        (CHAT, {"min_p": {}}, "min_p"),
        (CHAT, {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        (CHAT, {"modalities": [["audio"]]}, "modalities"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [HI, {"role": "assistant", "content": None}, HI]}, "chat template"),
        (CHAT, {"messages": [HI], "seed": 10**30}, "64"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "description": 4}}]}, "description"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"allowed_tools": {"mode": 1, "tools": [TOOL]}}}, "mode"),
        (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "tools": [FLAT]}}, "mode"),
        (RESPONSES, {"metadata": "x"}, "metadata"),
        (RESPONSES, {"metadata": {"k": 1}}, "metadata.k"),
        (MESSAGES, {"top_k": {}}, "top_k"),
        (RESPONSES, {"input": []}, "input is empty"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "computer_call"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "web_search"),
        (RESPONSES, {"previous_response_id": "resp_0"}, "resp_0"),
        (RESPONSES, {"background": True}, "background"),
        (MESSAGES, {"max_tokens": None}, "max_tokens: Field required"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        (MESSAGES, {"tool_choice": {"type": "must"}}, "must"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(path: str, change: dict[str, Any], words: str) -> None:
    async with running() as started:
        session, _ = await started.session()
        reply = await started.post(f"/sessions/{session}{path}", BODIES[path] | change)
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]
        assert await started.nodes(session) == []


CATS: dict[str, Any] = {"query": "cats"}


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHAT, {"messages": [HI, called(CATS)]}),
        (CHAT, {"messages": [HI, called(json.dumps(CATS))]}),
        (RESPONSES, {"input": [HI, {"type": "function_call", "call_id": "1", "name": "search", "arguments": CATS}]}),
        (MESSAGES, {"messages": [HI, {"role": "assistant", "content": [USED | {"input": CATS}]}]}),
    ],
)
async def test_the_model_sees_the_arguments_of_its_calls_in_either_form(path: str, change: dict[str, Any]) -> None:
    async with running() as started:
        session, key = await started.session()
        reply = await started.post(path, BODIES[path] | change, x_api_key=key)
        assert reply.status_code == 200, reply.text
        assert '"arguments": {"query": "cats"}' in (await started.nodes(session))[0]["full_text"]


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/embeddings", "invalid_request_error"), ("/v1/messages/batches", "not_found_error")]
)
async def test_an_address_that_there_is_not_and_a_wrong_method_are_errors_of_the_api(path: str, kind: str) -> None:
    async with running() as started:
        reply = await started.post(path, {})
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, kind)
        assert path in reply.json()["error"]["message"]
        reply = await started.http.get(MESSAGES if "messages" in path else CHAT)
        assert (reply.status_code, reply.json()["error"]["type"]) == (405, "invalid_request_error")
        assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"id": "a/b"}, "id"),
        ({"id": "two\nlines"}, "id"),
        ({"id": "x" * 1000}, "id"),
        ({"settings": {"temperature": -1}}, "settings.temperature"),
        ({"settings": {"top_p": 9}}, "settings.top_p"),
        ({"settings": {"max_tokens": 0}}, "settings.max_tokens"),
    ],
)
async def test_a_session_whose_calls_could_only_fail_is_not_made(asked: dict[str, Any], named: str) -> None:
    async with running() as started:
        reply = await started.post("/sessions", asked)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"].startswith(f"{named}: ")
        assert (await started.http.get("/sessions")).json() == {"sessions": []}


async def test_a_head_without_end_is_refused_and_others_are_served() -> None:
    async with running() as started:
        _, key = await started.session()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(started.url.rpartition(":")[2]))
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * 200_000)
        assert b"400 Bad Request" in await reader.read(1000)
        writer.close()
        assert (await started.post(CHAT, BODIES[CHAT], x_api_key=key)).status_code == 200


async def test_a_stop_sequence_ends_the_text_and_its_tokens_are_kept() -> None:
    async with running(lambda prompt: "one END two") as started:
        session, key = await started.session()
        reply = await started.post(
            MESSAGES, BODIES[MESSAGES] | {"stop_sequences": ["END"], "max_tokens": 99}, x_api_key=key
        )
        assert [block["text"] for block in reply.json()["content"]] == ["one "]
        assert (reply.json()["stop_reason"], reply.json()["stop_sequence"]) == ("stop_sequence", "END")
        assert started.server.requests[-1][1]["stop"] == ["END"]
        assert "END" in (await started.nodes(session))[0]["full_text"]


async def test_n_answers_are_n_sequences_and_logprobs_are_those_that_are_trained() -> None:
    async with running() as started:
        session, key = await started.session()
        body = BODIES[CHAT] | {"n": 3, "logprobs": True, "stop": None}
        choices = (await started.post(CHAT, body, x_api_key=key)).json()["choices"]
        nodes = await started.nodes(session)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len(nodes) == 3
    told = [each["logprob"] for each in choices[0]["logprobs"]["content"]]
    assert told == [value for value in nodes[0]["logprobs"] if value != 1.0]


async def test_a_conversation_beyond_the_context_is_refused_as_the_api_does() -> None:
    async with running(context=40) as started:
        _, key = await started.session()
        long = {"role": "user", "content": "x" * 99}
        reply = await started.post(CHAT, BODIES[CHAT] | {"messages": [long]}, x_api_key=key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        short = await started.post(CHAT, BODIES[CHAT], x_api_key=key)
        assert short.status_code == 200
        tokens = started.server.requests[-1][1]
        assert tokens["max_tokens"] == 40 - short.json()["usage"]["prompt_tokens"]


async def test_what_the_template_is_given_counts_in_the_context() -> None:
    template = "{{ 'more ' * (times or 0) }}" + CHATML
    async with running(context=80, tokenizer=make_tiny_tokenizer(chat_template=template)) as started:
        _, key = await started.session()
        asked = BODIES[CHAT] | {"chat_template_kwargs": {"times": 5}}
        reply = await started.post(CHAT, asked, x_api_key=key)
        assert reply.status_code == 200, reply.text
        used = reply.json()["usage"]["prompt_tokens"]
        assert used > 25
        assert started.server.requests[-1][1]["max_tokens"] == 80 - used


@pytest.mark.parametrize(
    "arguments", [{"chat_template": "{{ 'owned' }}"}, {"tokenize": True}, {"return_tensors": "pt"}, {"max_length": 1}]
)
async def test_an_agent_chooses_neither_the_template_nor_how_it_is_applied(arguments: dict[str, Any]) -> None:
    async with running() as started:
        _, key = await started.session()
        reply = await started.post(CHAT, BODIES[CHAT] | {"chat_template_kwargs": arguments}, x_api_key=key)
        assert (reply.status_code, started.server.requests) == (400, [])
        assert f"{next(iter(arguments))} is no argument of a chat template" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "name"), [(CHAT, "stop"), (MESSAGES, "stop_sequences")])
async def test_stop_sequences_are_few_as_vllm_looks_for_each_at_each_token(path: str, name: str) -> None:
    async with running() as started:
        _, key = await started.session()
        for count, status in ((64, 200), (65, 400)):
            reply = await started.post(path, BODIES[path] | {name: [f"<{n}>" for n in range(count)]}, x_api_key=key)
            assert reply.status_code == status, reply.text


TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [TOOL],
    RESPONSES: [FLAT],
    MESSAGES: [{"name": "search", "input_schema": PARAMETERS}],
}
WRITTEN = [
    '{"a": NaN}',
    '{"a": 1e400}',
    '{"a": "\\ud800"}',
    '{"\\udfff": 1}',
    '"{\\"a\\": NaN}"',
    '"\\ud800"',
    '{"a":' * 970 + "1" + "}" * 970,
    json.dumps('{"a":' * 3000 + "1" + "}" * 3000),
]


@pytest.mark.parametrize("path", TOOLS)
async def test_an_agent_is_told_each_call_whatever_the_model_wrote_into_it(path: str) -> None:
    said = iter(WRITTEN * 2)
    answer = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    async with running(lambda prompt: answer.replace("{}", next(said), 1)) as started:
        body = BODIES[path] | {"tools": TOOLS[path]} | ({"max_tokens": 50_000} if path == MESSAGES else {})
        for stream in (False, True):
            for written in WRITTEN:
                _, key = await started.session(max_tokens=50_000)
                reply = await started.post(path, body | {"stream": stream}, x_api_key=key)
                assert reply.status_code == 200, (written[:40], reply.text)
                told = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
                for each in told if stream else [reply.text]:
                    inner = msgspec.json.decode(each)  # which takes neither NaN nor half of a pair
                    if inner.get("type") == "content_block_delta":
                        msgspec.json.decode(inner["delta"].get("partial_json", "{}"))
                assert "search" in reply.text


async def test_an_agent_may_send_back_half_a_pair_as_json_writes_it() -> None:
    async with running() as started:
        session, key = await started.session()
        body = BODIES[CHAT] | {"messages": [HI, called('{"a": "\\ud800"}'), HI]}
        reply = await started.post(CHAT, body, x_api_key=key)
        assert reply.status_code == 200, reply.text
        assert '{"a": "\\ud800"}' in (await started.nodes(session))[0]["full_text"]


def _said_in_pieces(count: int) -> object:
    items = [{"type": "function_call", "name": "a", "call_id": "1"}, {"role": "assistant", "content": "words " * 9}]
    return responses.read({"input": items * (count // 2)}, lambda _: [])


def _chosen_tools(count: int) -> object:
    tools = [{"type": "function", "name": f"tool_{number}"} for number in range(count)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    return responses.read({"input": "hi", "tools": tools, "tool_choice": choice}, lambda _: [])


def _called_at_once(count: int) -> object:
    calls = [called(str(number))["tool_calls"][0] | {"id": str(number)} for number in range(count)]
    return ToolCallTranslator(None).convert_messages_for_template([{"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("read", [_said_in_pieces, _chosen_tools, _called_at_once])
def test_a_request_of_many_pieces_is_read_in_linear_time(read: Callable[[int], object]) -> None:
    assert_linear(lambda pieces: read(len(pieces)), "x" * 40_000)


async def test_tokens_are_counted_as_they_are_sampled_from_and_models_are_listed() -> None:
    async with running(models=("alias",)) as started:
        session, key = await started.session()
        given = {name: value for name, value in BODIES[MESSAGES].items() if name != "max_tokens"}
        counted = await started.post(f"{MESSAGES}/count_tokens", given, x_api_key=key)
        again = await started.post(f"{RESPONSES}/input_tokens", BODIES[RESPONSES], x_api_key=key)
        assert await started.nodes(session) == []
        used = (await started.post(MESSAGES, BODIES[MESSAGES], x_api_key=key)).json()["usage"]["input_tokens"]
        assert counted.json()["input_tokens"] == again.json()["input_tokens"] == used > 0
        names = [card["id"] for card in (await started.http.get("/v1/models")).json()["data"]]
        assert names == ["fake", "alias"]
        assert (await started.http.get("/v1/models/alias")).status_code == 200
        assert (await started.http.get("/v1/models/other")).status_code == 404


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_shows_life_before_the_reply_and_ends_in_an_error_that_comes_later(path: str) -> None:
    async with running(keep_alive_s=0.05) as started:
        _, key = await started.session()
        body = BODIES[path] | {"stream": True}
        started.server.delay_s = 0.5
        lines = (await started.post(path, body, x_api_key=key)).text.splitlines()
        alive = [line for line in lines if line in (": keep-alive", "event: ping")]
        assert len(alive) >= 3
        assert lines.index(alive[0]) == 0
        assert "yes" in "".join(lines)
        started.server.fail_next(1, 400)
        different = {"temperature": 0.5}
        refused = (await started.post(path, body | different, x_api_key=key)).text
        assert "error" in refused
        started.server.delay_s = 0.0


async def test_a_session_is_named_by_key_header_address_and_field_and_children_belong_to_it() -> None:
    async with running() as started:
        session, key = await started.session()
        texts = iter("abcdefg")

        async def ask(path: str = CHAT, more: dict[str, Any] | None = None, **headers: str) -> int:
            body = BODIES[CHAT] | {"messages": [{"role": "user", "content": next(texts)}]} | (more or {})
            return (await started.post(path, body, **headers)).status_code

        assert await ask(authorization=f"Bearer {key}") == 200
        assert await ask(x_session_id=session) == 200
        assert await ask(proxy_x_session_id=session) == 200
        assert await ask(f"/sessions/{session}{CHAT}") == 200
        assert await ask(more={"proxy_x_session_id": session}) == 200
        assert await ask(x_api_key=key, x_session_id="sub", x_parent_session_id=session) == 200
        shown = (await started.http.get(f"/sessions/{session}")).json()
        assert (shown["turns"], shown["children"], len(await started.nodes(session))) == (5, [f"{session}:sub"], 6)
        assert shown["branches"] == 4
        assert (await started.http.delete(f"/sessions/{session}")).status_code == 200
        assert (await started.http.get("/sessions")).json() == {"sessions": []}


async def test_no_page_and_no_foreign_host_is_answered() -> None:
    async with running() as started:
        for headers in ({"Host": "evil.test"}, {"Origin": "http://evil.test"}):
            assert (await started.http.get("/sessions", headers=headers)).status_code == 403


async def test_a_server_that_is_down_is_a_gateway_error_and_the_session_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as started:
        _, key = await started.session()

        async def down(*_: object, **__: object) -> None:
            raise KeyError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(ManagedServer, "chat_completion", down)
            reply = await started.post(CHAT, BODIES[CHAT], x_api_key=key)
            assert (reply.status_code, "KeyError" in reply.text) == (500, True)
        assert (await started.post(CHAT, BODIES[CHAT], x_api_key=key)).status_code == 200
