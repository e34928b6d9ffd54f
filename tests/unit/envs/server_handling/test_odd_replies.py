"""What servers of other people answer with 200: an error inside is tried again like the status that it names, and what
no client can read is one line that names the server.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from atroposlib.envs.judge import Judge, JudgeConfig
from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.envs.server_handling.errors import PermanentServerError, RetryableServerError
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from tests.serving import serving

CHAT = [{"role": "user", "content": "hi"}]


def answer(content: Any, **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": message, **fields}]}


FINE = answer("<score>5</score>")


@dataclass
class Odd:
    """Gives `replies` in turn, then FINE."""

    replies: list[Any]
    asked: int = 0

    @property
    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self.reply), web.post("/v1/completions", self.reply)]

    async def reply(self, request: web.Request) -> web.Response:
        self.asked += 1
        reply = self.replies.pop(0) if self.replies else FINE
        if isinstance(reply, web.Response):
            return reply
        return web.Response(body=json.dumps(reply), content_type="application/json")


async def at_once(seconds: float) -> None:
    await asyncio.sleep(0)


def client(url: str) -> OpenAIServer:
    server = OpenAIServer(APIServerConfig(base_url=f"{url}/v1", model_name="m", health_check=False))
    server.retry = RetryPolicy(sleep=at_once)
    return server


async def asked(replies: list[Any], call: str = "chat_completion") -> tuple[Any, int]:
    """What the client made of it, and how often it asked."""
    odd = Odd(replies)
    async with serving(odd.routes) as url:
        server = client(url)
        try:
            arguments: dict[str, Any] = {"messages": CHAT} if call == "chat_completion" else {"prompt": "hi"}
            return await getattr(server, call)(**arguments), odd.asked
        except Exception as error:
            return error, odd.asked
        finally:
            await server.close()


PASSING = {
    "an error with a code": {"error": {"message": "model overloaded", "code": 503}},
    "a code as text": {"error": {"message": "slow down", "code": "429"}},
    "a code by name": {"error": {"message": "slow down", "code": "rate_limit_exceeded"}},
    "a type": {"error": {"message": "busy", "type": "overloaded_error"}},
    "an error without a code": {"error": {"message": "something broke"}},
    "an error of text": {"error": "upstream failed"},
    "an error beside null": {"choices": None, "error": {"message": "provider returned error", "code": 502}},
    "null": {"choices": None},
    "no choice": {"choices": []},
    "an error in the choice": answer("", error={"message": "provider gave up", "code": 502}),
    "an end by error": answer("half", finish_reason="error"),
    "an error of vLLM's former form": {"object": "error", "message": "busy", "code": 500},
    "JSON that was cut": web.Response(body=b'{"choices": [', content_type="application/json"),
    "an empty body": web.Response(body=b"", content_type="application/json"),
}


@pytest.mark.parametrize("name", PASSING)
async def test_what_may_pass_is_tried_again(name: str) -> None:
    reply, times = await asked([_copy(PASSING[name])])
    assert times == 2, reply
    assert reply.choices[0].message.content == "<score>5</score>"


@pytest.mark.parametrize("name", PASSING)
async def test_what_does_not_pass_ends_in_one_line_that_names_the_server(name: str) -> None:
    error, times = await asked([_copy(PASSING[name]) for _ in range(6)])
    assert times == 6
    assert isinstance(error, RetryableServerError)
    assert "http://127.0.0.1:" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(("n", "given"), [(1, 3), (2, 3)])
async def test_of_more_choices_than_were_asked_for_the_first_are_taken(n: int, given: int) -> None:
    many = {"choices": [answer(f"answer {at}")["choices"][0] | {"index": at} for at in range(given)]}
    async with serving(Odd([many]).routes) as url:
        server = client(url)
        reply = await server.chat_completion(messages=CHAT, n=n)
        await server.close()
    assert [choice.message.content for choice in reply.choices] == [f"answer {at}" for at in range(n)]


def _copy(reply: Any) -> Any:
    """A response can be sent once."""
    return web.Response(body=reply.body, content_type=reply.content_type) if isinstance(reply, web.Response) else reply


FOR_GOOD = {
    "a refusal": {"error": {"message": "no such model", "code": 404}},
    "a refusal by name": {"error": {"message": "bad", "type": "invalid_request_error"}},
    "a page": web.Response(text="<html>Welcome</html>", content_type="text/html"),
    "a list": [],
    "a text": "hello",
    "null": None,
    "a number": 7,
    "something else": {"status": "ok"},
    "choices of text": {"choices": ["hello"]},
    "choices that are a text": {"choices": "hello"},
    "choices that are a map": {"choices": {"0": "hello"}},
    "a choice without a message": {"choices": [{"index": 0, "message": None}]},
    "a content that is a number": answer(7),
    "parts without text": answer([7]),
}


@pytest.mark.parametrize("name", FOR_GOOD)
async def test_what_no_client_reads_is_one_line_that_names_the_server(name: str) -> None:
    error, times = await asked([_copy(FOR_GOOD[name])])
    assert times == 1
    assert type(error) is PermanentServerError, error
    assert "http://127.0.0.1:" in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        (answer([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "ab"),
        (answer(["a", "b"]), "ab"),
        (answer(None), None),
        (answer("a", finish_reason=None), "a"),
        ({**answer("a"), "usage": None}, "a"),
        ({**answer("a"), "usage": {"prompt_tokens": None}}, "a"),
        ({**answer("a"), "error": None}, "a"),
    ],
)
async def test_what_can_be_read_is(reply: Any, content: str | None) -> None:
    found, times = await asked([reply])
    assert times == 1
    assert found.choices[0].message.content == content
    assert found.usage is None


async def test_an_error_in_a_charset_that_makes_no_text_is_one_line_that_names_the_server() -> None:
    headers = {"Content-Type": "text/html; charset=base64"}
    error, times = await asked([web.Response(body=b"no \xff", status=400, headers=headers)])
    assert times == 1
    assert type(error) is PermanentServerError, error
    assert "replied 400: no" in str(error)


async def test_a_text_completion_is_checked_too() -> None:
    assert (await asked([{"choices": None}], "completion"))[1] == 2
    error, _ = await asked([{"choices": [{"index": 0, "text": {"a": 1}}]}], "completion")
    assert type(error) is PermanentServerError
    found, _ = await asked([{"choices": [{"index": 0, "text": None}]}], "completion")
    assert found.choices[0].text == ""


@pytest.mark.parametrize("name", FOR_GOOD)
async def test_a_judge_that_answered_once_gives_no_score_for_what_it_cannot_read(name: str) -> None:
    odd = Odd([FINE, _copy(FOR_GOOD[name])])
    async with serving(odd.routes) as url:
        judge = Judge(JudgeConfig(base_url=f"{url}/v1", model="judge"), "Rate {answer}.", scale=(0.0, 10.0))
        judge._server.retry = RetryPolicy(sleep=at_once)
        assert [await judge.score(answer="x") for _ in range(3)] == [0.5, None, 0.5]
        await judge.close()
