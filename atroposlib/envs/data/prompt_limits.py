"""Training questions whose prompt leaves no room for an answer are left out when the data is loaded. A server refuses
them, or the trainer drops their sequences, in every epoch again.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from atroposlib.envs.data.data_report import DataReport, LoadedData
from atroposlib.envs.errors import DataError
from atroposlib.envs.payloads import Item
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.managed_server import ManagedServer

log = get_logger(__name__)

# By size, not by time: which questions a run asks does not depend on the machine.
BUDGET_BYTES = 32_000_000  # of prompts: about 10 s of a fast tokenizer
LEAST_BYTES = 64  # that a prompt counts for
BETWEEN_PAUSES = 256  # questions
TEMPLATE_BYTES = 1024  # that a chat template adds, at most: a shorter text is not tokenised
KIND = "with a prompt over the limit of {} tokens ({})"
LOOKED_AT = "lengths of prompts"


class Asks(Protocol):
    """A `QuestionEnv`, of which this needs the prompt of each item and its length."""

    server: Any
    tokenizer: Any
    held_out: Sequence[Item]

    def _prompt_of(self, item: Item) -> Messages | None: ...


async def leave_out_long(env: Asks, data: LoadedData, limit: int, whose: str, *, held_out_too: bool) -> None:
    """Leave those questions out of the training streams whose prompt has `limit` tokens or more; count them, and those
    that are held out. About BUDGET_BYTES of prompts are looked at; the report says how many prompts.

    Raises DataError if no training question is left.
    """
    report = data.reports[0] if data.reports else DataReport("the questions")
    kind = KIND.format(limit, whose)
    async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
        look = Look(lambda item: _looked_at(env, managed, item, limit))
        for stream in data.streams:
            places = await look.at(stream.items)
            for place in sorted(places):
                report.add(kind, "left out", repr(stream.items[place]))
            if places and len(places) == len(stream.items):
                raise DataError(f"each of the {len(places)} questions is one {kind}: give shorter ones, or raise it")
            if places:
                stream.leave_out(places)
                report.train -= len(places)
        for place in sorted(await look.at(env.held_out) if held_out_too else ()):
            report.add(f"held out {kind}", "asked, and without a score", repr(env.held_out[place]))
    if look.looked < look.total:
        report.looked_at[LOOKED_AT] = f"looked at {look.looked} of {look.total}"
    if report.findings and report not in data.reports:
        data.reports.append(report)


class Look:
    """Looks at items until it has read `left` bytes. `looked_at` tells whether an item reaches the limit, and its
    bytes.
    """

    def __init__(self, looked_at: Callable[[Item], tuple[bool, int]], left: int = BUDGET_BYTES) -> None:
        self._looked_at = looked_at
        self._left = left
        self.looked = self.total = 0

    async def at(self, items: Sequence[Item]) -> set[int]:
        """The places of those that reach the limit."""
        found = set[int]()
        self.total += len(items)
        for place, item in enumerate(items):
            if self._left <= 0:
                break
            if place % BETWEEN_PAUSES == BETWEEN_PAUSES - 1:
                await asyncio.sleep(0)  # heartbeats continue
            self.looked += 1
            reaches, size = self._looked_at(item)
            self._left -= max(size, LEAST_BYTES)
            if reaches:
                found.add(place)
        return found


def _looked_at(env: Asks, managed: "ManagedServer", item: Item, limit: int) -> tuple[bool, int]:
    """Return whether the prompt of an item has `limit` tokens, and its bytes. False where that is not known: what an
    author's `prompt`, or the chat template, raises is told when the item is asked.
    """
    try:
        return _measured(env._prompt_of(item), managed, limit)
    except Exception:  # the author's code may raise anything, and so may a template that refuses the messages
        return False, 0


def _measured(messages: Messages | None, managed: "ManagedServer", limit: int) -> tuple[bool, int]:
    if messages is None or not all(isinstance(message.get("content"), str) for message in messages):
        return False, 0
    size = sum(len(str(message["content"]).encode()) for message in messages)
    if size + TEMPLATE_BYTES < limit:
        return False, size  # a token is a byte at least
    length = managed.prompt_length(messages)
    return length is not None and length >= limit, size
