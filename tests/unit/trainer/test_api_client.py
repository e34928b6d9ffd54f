"""The trainer's API client against a server that is late, restarted, wrong or gone."""

import threading
import time
from typing import Any

import pytest

from example_trainer.api_client import ApiClient, ApiError
from tests.unit.trainer.fakes import FakeApi, item, serve

REGISTRATION = {"batch_size": 2, "num_steps": 3}


def client(url: str, patience_s: float = 5.0) -> ApiClient:
    return ApiClient(url, REGISTRATION, patience_s=patience_s)


def batches(count: int) -> list[dict[str, Any]]:
    return [item([1.0, 0.0], seed=count)]


def free_port() -> int:
    with serve(FakeApi(batches)) as url:
        return int(url.rpartition(":")[2])


def test_registers_and_fetches() -> None:
    api = FakeApi(batches)
    with serve(api) as url:
        trainer = client(url)
        trainer.register(starting_step=4)
        assert trainer.fetch_batch(5)[0]["scores"] == [1.0, 0.0]
    assert api.registrations == [REGISTRATION | {"starting_step": 4}]


def test_polls_until_there_is_a_batch() -> None:
    left = iter([None, None, None])
    with serve(FakeApi(lambda n: next(left, batches(n)))) as url:  # type: ignore[arg-type]
        trainer = client(url)
        trainer.register(0)
        assert len(trainer.fetch_batch(5)) == 1


def test_no_batch_in_time_says_what_to_check() -> None:
    with serve(FakeApi(lambda n: None)) as url:
        trainer = client(url)
        trainer.register(0)
        with pytest.raises(ApiError, match="no batch of 2 sequences from .* within 0 s; check that an environment is running"):
            trainer.fetch_batch(0.2)


def test_an_api_that_forgot_its_trainer_is_registered_with_again_from_the_step_reached() -> None:
    api = FakeApi(batches)
    with serve(api) as url:
        trainer = client(url)
        trainer.register(0)
        trainer.report_step(2, 2)
        api.forget_trainer = True
        assert trainer.fetch_batch(5)
    assert [entry["starting_step"] for entry in api.registrations] == [0, 2]
    assert api.steps == [{"step": 2, "policy_version": 2}] * 2


def test_an_api_that_comes_up_late_is_waited_for() -> None:
    port, api, up = free_port(), FakeApi(batches), threading.Event()

    def start_late() -> None:
        time.sleep(0.4)
        with serve(api, port):
            up.wait(10)

    thread = threading.Thread(target=start_late)
    thread.start()
    client(f"http://127.0.0.1:{port}").wait_until_up()
    up.set()
    thread.join()


def test_an_absent_api_ends_in_an_error_with_the_remedy() -> None:
    with pytest.raises(ApiError, match=r"did not answer GET /info within 0 s \(connection refused\); start it with .*run_api"):
        client(f"http://127.0.0.1:{free_port()}", patience_s=0.3).wait_until_up()


def test_evaluation_waits_for_pending_environments_and_averages() -> None:
    api = FakeApi(batches)
    api.evaluations, api.pending = {3: 0.75}, {3: 2}
    with serve(api) as url:
        assert client(url).evaluation(3, deadline_s=5) == 0.75


def test_evaluation_gives_up_at_its_deadline_and_never_waits_with_zero() -> None:
    api = FakeApi(batches)
    api.evaluations, api.pending = {3: 0.75}, {3: 10**6}
    with serve(api) as url:
        start = time.monotonic()
        assert client(url).evaluation(3, deadline_s=0) is None
        assert client(url).evaluation(3, deadline_s=0.3) is None
        assert time.monotonic() - start < 3


def test_a_server_that_is_not_the_api_is_named() -> None:
    api = FakeApi(batches)
    api.answer = lambda *request: [1, 2]  # type: ignore[method-assign,return-value,assignment]
    with serve(api) as url, pytest.raises(ApiError, match="answered list instead of an object; is --atropos-url the batching API"):
        client(url).wait_until_up()
    with pytest.raises(ApiError, match="--atropos-url http://exa mple cannot be used"):
        client("http://exa mple").wait_until_up()
