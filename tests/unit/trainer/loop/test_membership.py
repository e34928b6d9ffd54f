"""Servers that join and leave a run, as the batching API lists them."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from example_trainer.bridges.base import BridgeError, WeightBridge
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.loop.api_client import ApiClient
from example_trainer.loop.membership import Membership
from example_trainer.loop.timeline import Timeline
from tests.unit.trainer.fakes import RecordingBridge

NEW = "http://127.0.0.1:9002"


class Api:
    """Lists servers, and takes reports of them."""

    def __init__(self) -> None:
        self.listed: dict[str, Any] = {}

    def servers(self) -> dict[str, Any]:
        return self.listed

    def change_server(self, url: str, state: str) -> None:
        self.listed[url] = state


class Bridge:
    """Feeds whom it admits from the next sync on; keeps one server at least."""

    def __init__(self) -> None:
        self.fed = [client(9001)]
        self.new: list[VllmClient] = []

    def admit(self, url: str) -> None:
        if url.endswith(":1"):
            raise BridgeError("cannot be reached")
        if all(each.url != url for each in [*self.fed, *self.new]):
            self.new.append(client(int(url.rpartition(":")[2])))

    def release(self, url: str, gone: bool = False) -> None:
        if [each.url for each in self.fed] == [url]:
            raise BridgeError("the only one")
        self.fed = [each for each in self.fed if each.url != url]

    def synced(self) -> None:
        self.fed += self.new
        self.new = []

    def joined(self) -> Sequence[VllmClient]:
        return self.fed[1:]


def client(port: int) -> VllmClient:
    return VllmClient("127.0.0.1", port, None, 1.0)


class Members:
    """A membership, with what it stands on."""

    def __init__(self) -> None:
        self.api, self.bridge = Api(), Bridge()
        self.timeline = Timeline([self.bridge.fed[0]])
        self.membership = Membership(cast(ApiClient, self.api), cast(WeightBridge, self.bridge), self.timeline)

    def step(self) -> None:
        self.membership.follow()
        self.bridge.synced()
        self.membership.report()

    @property
    def watched(self) -> list[str]:
        return [each.url for each in self.timeline.clients]


def test_a_server_that_joins_is_reported_once_it_is_fed_and_then_counts_in_the_timeline() -> None:
    members = Members()
    members.step()
    members.api.listed[NEW] = "joining"
    members.membership.follow()
    assert members.api.listed == {NEW: "joining"}
    members.bridge.synced()
    members.membership.report()
    assert members.api.listed == {NEW: "serving"}
    members.step()
    assert members.watched == ["http://127.0.0.1:9001", NEW]
    members.api.listed[NEW] = "leaving"
    members.step()
    assert members.watched == ["http://127.0.0.1:9001"]
    assert members.api.listed == {NEW: "leaving"}  # whoever ends it says when it has left
    members.api.listed[NEW] = "joining"  # started again
    members.step()
    assert members.api.listed == {NEW: "serving"}


def test_a_server_that_cannot_join_is_reported_as_left_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    members = Members()
    members.api.listed["http://127.0.0.1:1"] = "joining"
    members.step()
    assert members.api.listed == {"http://127.0.0.1:1": "left"}
    assert "cannot join, and is reported as left: cannot be reached" in caplog.text


def test_the_last_server_stays_in_use_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    members = Members()
    members.api.listed["http://127.0.0.1:9001"] = "leaving"
    members.step()
    members.step()
    assert caplog.text.count("stays in use: the only one") == 1


def test_a_bridge_of_one_server_admits_none(caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    api.listed[NEW] = "joining"
    Membership(cast(ApiClient, api), RecordingBridge(), Timeline([])).follow()
    assert api.listed == {NEW: "left"}
    assert "feeds the servers of its configuration alone" in caplog.text
