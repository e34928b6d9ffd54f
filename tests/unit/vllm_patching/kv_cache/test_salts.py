"""Which requests may share keys and values, by the policy version at which their conversations began."""

import gc
import weakref
from dataclasses import dataclass

import msgspec
import pytest

from vllm_patching.kv_cache.salts import Salts, tagged


@dataclass(eq=False)
class Sent:
    """A request as it reaches the engine."""

    name: str
    cache_salt: str | None
    read: bool = False


class Engine:
    """Salts of one engine, and the requests that it has."""

    def __init__(self, most: int = 100) -> None:
        self.again: list[str] = []
        self.salts = Salts(lambda request: self.again.append(request.name), most)  # type: ignore[attr-defined]
        self.here: list[Sent] = []
        self.serve(0)

    def send(self, session: str | None = None, salt: str | None = None, *, read: bool = True) -> Sent:
        request = Sent(f"r{len(self.here)}", tagged(session, salt), read)
        self.salts.admit(request)
        self.here.append(request)
        return request

    def serve(self, version: int) -> None:
        self.salts.serve(str(version), [(each, each.read) for each in self.here])


def test_requests_share_with_those_that_began_at_the_same_version() -> None:
    engine = Engine()
    first, same = engine.send(), engine.send()
    engine.serve(1)
    later = engine.send()
    assert first.cache_salt == same.cache_salt
    assert later.cache_salt != first.cache_salt


def test_a_conversation_keeps_its_cache_over_syncs() -> None:
    engine = Engine()
    turn = engine.send("a").cache_salt
    engine.serve(1)
    engine.serve(2)
    assert engine.send("a").cache_salt == turn
    assert engine.send("b").cache_salt != turn


def test_the_clients_salt_counts_too_and_cannot_be_mistaken_for_a_version() -> None:
    engine = Engine()
    alone, salted, other = engine.send(), engine.send(salt="x"), engine.send(salt="y")
    assert len({alone.cache_salt, salted.cache_salt, other.cache_salt}) == 3
    assert engine.send(salt=str(alone.cache_salt)).cache_salt != alone.cache_salt


def test_a_request_that_a_sync_overtakes_unread_begins_at_the_new_version() -> None:
    engine = Engine()
    read, unread = engine.send(), engine.send(read=False)
    engine.serve(1)
    assert engine.again == ["r1"]
    assert unread.cache_salt != read.cache_salt
    assert unread.cache_salt == engine.send().cache_salt


def test_a_conversation_that_no_request_has_begun_to_read_begins_at_the_new_version_with_all_its_requests() -> None:
    engine = Engine()
    requests = [engine.send("a", read=False), engine.send("a", read=False)]
    engine.serve(1)
    now = engine.send().cache_salt
    assert [each.cache_salt for each in requests] == [now, now]
    assert engine.send("a").cache_salt == now


@pytest.mark.parametrize("first", [True, False])
def test_a_conversation_under_way_keeps_its_version_though_a_later_request_waits(first: bool) -> None:
    engine = Engine()
    begun = engine.send("a", read=first)
    waits = engine.send("a", read=not first)
    engine.serve(1)
    assert waits.cache_salt == begun.cache_salt
    assert engine.again == []


def test_a_later_turn_that_waits_keeps_the_version_of_the_turns_that_are_done() -> None:
    engine = Engine()
    turn = engine.send("a").cache_salt
    engine.here.clear()  # it has finished
    engine.serve(1)
    waits = engine.send("a", read=False)
    engine.serve(2)
    assert waits.cache_salt == turn


def test_no_salt_of_before_a_reset_comes_back_with_a_trainer_that_counts_from_the_start() -> None:
    engine = Engine()
    engine.serve(1)
    before = {engine.send().cache_salt, engine.send("a").cache_salt}
    engine.salts.reset()
    engine.serve(0)
    engine.serve(1)
    assert not before & {engine.send().cache_salt, engine.send("a").cache_salt}


def test_of_many_conversations_the_oldest_begin_again() -> None:
    engine = Engine(most=2)
    a, b = engine.send("a").cache_salt, engine.send("b").cache_salt
    engine.serve(1)
    engine.send("c")
    assert engine.send("b").cache_salt == b
    assert engine.send("a").cache_salt != a


def test_nothing_is_kept_of_requests_that_have_ended_though_no_sync_comes() -> None:
    engine = Engine()
    ended = [weakref.ref(engine.send()) for _ in range(3)]
    engine.here.clear()
    gc.collect()
    assert [each() for each in ended] == [None] * 3
    assert len(engine.salts._admitted) == 0


def test_a_request_without_a_tag_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        Salts(lambda request: None).admit(Sent("r", None))
