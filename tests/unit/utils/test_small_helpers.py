"""Selection, HTTP replies and tool calls."""

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.compat.best_of_n_selection import select_best_index
from atroposlib.compat.io import parse_http_response
from atroposlib.utils.tool_call_parser import parse_tool_call


@pytest.mark.parametrize(
    ("primary", "secondary", "flags", "best"),
    [
        ([1, 3, 2], [0, 9, 0], {}, 1),
        ([3, 3, 2], [5, 4, 0], {}, 1),
        ([3, 3, 3], [4, 4, 4], {}, 0),
        ([3, 1, 1], [0, 4, 5], {"primary_higher_is_better": False}, 1),
        ([3, 3, 1], [4, 5, 9], {"secondary_lower_is_better": False}, 1),
    ],
)
def test_the_best_alternative_wins_and_ties_go_by_the_second_score(
    primary: list[float], secondary: list[float], flags: dict[str, bool], best: int
) -> None:
    assert select_best_index(primary, secondary, **flags) == best


def test_scores_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="no scores"):
        select_best_index([], [])
    with pytest.raises(ValueError, match="2 primary and 1 secondary"):
        select_best_index([1, 2], [1])


async def test_replies_are_parsed_and_errors_logged_with_their_body(caplog: pytest.LogCaptureFixture) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.json_response({"asked": request.path}, status=200 if request.path == "/good" else 503)

    app = web.Application()
    app.add_routes([web.get("/good", reply), web.get("/bad", reply)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        async with session.get(server.make_url("/good")) as good:
            assert await parse_http_response(good) == {"asked": "/good"}
        async with session.get(server.make_url("/bad")) as bad:
            with pytest.raises(aiohttp.ClientResponseError, match="503"):
                await parse_http_response(bad)
    assert '/bad replied 503: {"asked": "/bad"}' in caplog.text


TOOLS: list[dict[str, Any]] = [{"name": "search"}, {"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("written", "parsed"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ("add", {"a": 1}, False)),
        (
            'hm <tool_call>\n{"name": "search", "arguments": {"q": "it\'s"}}\n</tool_call> done',
            ("search", {"q": "it's"}, False),
        ),
        ("<tool_call>{'name': 'add', 'arguments': {'a': 1}}</tool_call>", ("add", {"a": 1}, False)),
        ('<tool_call>{"name": "add"}</tool_call>', ("add", {}, False)),
        ('<tool_call>{"name": "drop", "arguments": {"a": 1}}</tool_call>', ("-ERROR-", {"a": 1}, True)),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', ("-ERROR-", {}, True)),
        ('<tool_call>{"name": "add"', ("-ERROR-", {}, True)),
        ("<tool_call>[1]</tool_call>", ("-ERROR-", {}, True)),
        ("<tool_call>nonsense(</tool_call>", ("-ERROR-", {}, True)),
        ("<tool_call></tool_call>", ("-ERROR-", {}, True)),
        ("no call", ("-ERROR-", {}, True)),
    ],
)
def test_tool_calls(written: str, parsed: tuple[str, dict[str, object], bool]) -> None:
    assert parse_tool_call(written, TOOLS) == parsed


def test_other_tags_and_unknown_tools_when_none_are_listed() -> None:
    written = f"<call>{json.dumps({'name': 'anything', 'arguments': {}})}</call>"
    assert parse_tool_call(written, preferred_tags=["tool", "call"]) == ("anything", {}, False)
