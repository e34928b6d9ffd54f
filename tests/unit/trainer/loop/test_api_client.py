"""The trainer's API client against a server that is late, restarted, wrong or gone."""

import contextlib
import os
import signal
import threading
import time
from statistics import median
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from atroposlib.wire.batching import Registration, ScoredData, TrainerStep
from atroposlib.wire.held_out import HeldOut
from atroposlib.wire.routes import LEASE_WAIT_S
from example_trainer import grpo
from example_trainer.loop.api_client import ApiClient, ApiError
from tests.client import http
from tests.serving import free_port
from tests.unit.api.support import api_settings
from tests.unit.trainer.fakes import FakeApi, item, serve
from tests.unit.trainer.whole_runs import real_api

RUN = Registration(
    wandb_group="g",
    wandb_project="p",
    batch_size=2,
    max_token_len=8,
    checkpoint_dir="",
    save_checkpoint_interval=0,
    starting_step=0,
    num_steps=9,
)


def client(url: str, patience_s: float = 5.0) -> ApiClient:
    return ApiClient(url, RUN, patience_s=patience_s)


def batches(count: int) -> list[dict[str, Any]]:
    return [item([1.0, 0.0], seed=count)]


def scores_of(trainer: ApiClient) -> list[float]:
    """Of the first group of its next batch."""
    group = trainer.fetch_batch(5)[0]
    assert isinstance(group, ScoredData)
    return group.scores


def test_registers_and_fetches() -> None:
    api = FakeApi(batches)
    with serve(api) as url:
        trainer = client(url)
        trainer.register(starting_step=4)
        assert scores_of(trainer) == [1.0, 0.0]
    assert api.registrations == [to_builtins(replace(RUN, starting_step=4))]


def test_polls_until_there_is_a_batch() -> None:
    left = iter([None, None, None])
    with serve(FakeApi(lambda n: next(left, batches(n)))) as url:
        trainer = client(url)
        trainer.register(0)
        assert len(trainer.fetch_batch(5)) == 1


def test_no_batch_in_time_says_what_to_check() -> None:
    with serve(FakeApi(lambda n: None)) as url:
        trainer = client(url)
        trainer.register(0)
        with pytest.raises(
            ApiError, match=r"from .* within 0 s \(there is none yet\); check that an environment is running"
        ):
            trainer.fetch_batch(0.2)


def test_an_api_that_forgot_its_trainer_is_registered_with_again_from_the_step_reached() -> None:
    api = FakeApi(batches)
    with serve(api) as url:
        trainer = client(url)
        trainer.register(0)
        trainer.report_step(TrainerStep(2, 2))
        api.forget_trainer = True
        assert trainer.fetch_batch(5)
    assert [entry["starting_step"] for entry in api.registrations] == [0, 2]
    assert api.steps == [{"step": 2, "policy_version": 2}] * 2


def test_an_api_that_comes_up_late_is_waited_for() -> None:
    port, pauses = free_port(), list[float]()
    with contextlib.ExitStack() as services:

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                services.enter_context(serve(FakeApi(batches), port))

        ApiClient(f"http://127.0.0.1:{port}", RUN, patience_s=60, sleep=pause).wait_until_up()
        assert len(pauses) == 3


def test_evaluation_waits_for_pending_environments_and_averages() -> None:
    api = FakeApi(batches)
    api.evaluations, api.pending = {3: 0.75}, {3: 2}
    with serve(api) as url:
        assert client(url).evaluation(3, deadline_s=5) == HeldOut(0.75)


def test_evaluation_gives_up_at_its_deadline_and_never_waits_with_zero() -> None:
    api, pauses = FakeApi(batches), list[float]()
    api.evaluations, api.pending = {3: 0.75}, {3: 10**9}
    with serve(api) as url:
        trainer = ApiClient(url, RUN, patience_s=5, sleep=pauses.append)
        assert trainer.evaluation(3, deadline_s=0) is None
        assert (pauses, api.pending[3]) == ([], 10**9 - 1)  # asked once
        assert trainer.evaluation(3, deadline_s=0.2) is None
        assert len(pauses) > 1
        api.pending[3] = 0
        assert trainer.evaluation(3, deadline_s=0) == HeldOut(0.75)


def test_a_server_that_is_not_the_api_or_absent_is_named_with_the_remedy() -> None:
    api = FakeApi(batches)
    api.answer = lambda *request: [1, 2]  # type: ignore[method-assign,assignment]
    with serve(api) as url:
        for address, says in (
            (url, "answered list instead of an object; is --atropos-url the batching API"),
            ("http://exa mple", "--atropos-url http://exa mple cannot be used"),
            (
                f"http://127.0.0.1:{free_port()}",
                r"did not answer GET /info within 0 s \(connection refused\); start it with .*run_api",
            ),
        ):
            with pytest.raises(ApiError, match=says):
                client(address, patience_s=0.3).wait_until_up()


# --- against the real API -------------------------------------------------------------------------------------------


def trainer_of(
    url: str, *, first_batches: int = 0, token: str | None = None, **registered: Any
) -> tuple[ApiClient, list[float]]:
    """A registered trainer, and the first scores of so many batches that it fetched."""
    trainer = ApiClient(url, RUN, patience_s=5, token=token)
    trainer.register(0, run="r", **registered)
    return trainer, [scores_of(trainer)[0] for _ in range(first_batches)]


def post_groups(url: str, count: int) -> None:
    for number in range(count):
        group = {key: value for key, value in item([float(number), -1.0]).items() if value is not None}
        http.post(f"{url}/scored_data", json=group, timeout=10).raise_for_status()


def test_what_was_not_acknowledged_goes_to_the_trainer_that_goes_on() -> None:
    with real_api() as url:
        post_groups(url, 4)
        trainer, fetched = trainer_of(url, first_batches=1)
        trainer.acknowledge()
        trainer.fetch_batch(5)
        trainer.fetch_batch(5)
        trainer.close()  # as by a kill: two batches are not acknowledged
        assert fetched == [0.0]
        assert trainer_of(url, first_batches=3)[1] == [1.0, 2.0, 3.0]


def test_a_checkpoint_that_was_written_but_not_acknowledged_is_not_repeated() -> None:
    with real_api() as url:
        post_groups(url, 3)
        trainer, _ = trainer_of(url, first_batches=2)
        in_checkpoint = list(trainer.holding)
        trainer.close()
        assert len(in_checkpoint) == 2
        assert trainer_of(url, first_batches=1, trained_leases=in_checkpoint)[1] == [2.0]


def test_a_trainer_that_was_replaced_is_told_so_and_a_fresh_run_gets_no_groups_of_another() -> None:
    with real_api() as url:
        old, _ = trainer_of(url)
        trainer_of(url)
        with pytest.raises(ApiError, match=r"another trainer has registered .* end one of the two"):
            old.fetch_batch(5)
        post_groups(url, 1)
        fresh = ApiClient(url, RUN, patience_s=5)
        fresh.register(0, run="another")
        with pytest.raises(ApiError, match="no batch"):
            fresh.fetch_batch(0.1)


def test_signs_of_life_are_sent_while_a_batch_is_held_and_end_with_the_client() -> None:
    with real_api() as url:
        post_groups(url, 1)
        trainer = ApiClient(url, RUN, patience_s=5)
        trainer._heartbeat._interval_s = 0.05
        trainer.register(0)
        beats: list[object] = []
        beat = trainer._heartbeat._beat
        trainer._heartbeat._beat = lambda: beats.append(beat())
        trainer.fetch_batch(5)
        thread, end = trainer._heartbeat._thread, time.monotonic() + 30
        while len(beats) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert thread is not None
        assert thread.is_alive()
        trainer.close()
        assert not thread.is_alive()


def test_the_token_is_sent_and_a_wrong_one_names_the_remedy() -> None:
    with real_api(api_settings(api_token="right-token")) as url:
        trainer_of(url, token="right-token")
        with pytest.raises(ApiError, match="needs its token: set ATROPOS_API_TOKEN"):
            trainer_of(url, token="wrong-token")


def test_an_api_without_leases_gives_its_batches_for_good() -> None:
    api = FakeApi(batches)
    with serve(api) as url:
        trainer = client(url)
        trainer.register(0)
        assert trainer.fetch_batch(5)
        assert trainer.fetch_batch(5)
        assert api.delivered == 2
        assert list(trainer.holding) == []
        trainer.acknowledge()


def test_an_api_that_takes_no_more_for_now_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.api.http.admission.BURST_S", 0.0)
    with real_api(settings=api_settings(max_requests_per_second=5)) as url:
        trainer, _ = trainer_of(url)
        for step in range(3):
            trainer.report_step(TrainerStep(step, step))


# --- waiting for a batch in the API ---------------------------------------------------------------------------------


def test_the_trainer_has_a_batch_50_ms_after_it_is_complete() -> None:
    with real_api() as url:
        trainer, _ = trainer_of(url)
        posted: list[float] = []

        def post_soon(number: int) -> None:
            time.sleep(0.1 + 0.02 * number)  # after the requests that do not wait
            posted.append(time.monotonic())
            post_groups(url, 1)

        late = []
        for number in range(10):
            environment = threading.Thread(target=post_soon, args=(number,))
            environment.start()
            trainer.fetch_batch(20)
            late.append(time.monotonic() - posted[-1])
            environment.join()
        assert median(late) <= 0.05, late  # of a busy machine one or two may be late for other reasons


def test_an_api_that_does_not_wait_is_polled_with_pauses() -> None:
    asked: list[dict[str, Any]] = []

    class OlderApi(FakeApi):
        def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
            if path != "/batch/lease":
                return super().answer(method, path, query, body)
            asked.append(body)
            return {"batch": None, "lease": None}

    with serve(OlderApi(batches)) as url:
        trainer = client(url)
        trainer.register(0)
        with pytest.raises(ApiError, match="there is none yet"):
            trainer.fetch_batch(1)
    assert 3 < len(asked) < 12
    assert all(0 < body["wait_s"] <= LEASE_WAIT_S for body in asked[1:-1])


def test_a_long_wait_asks_seldom_logs_little_and_looks_after_the_bridge(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atroposlib.wire.routes.LEASE_WAIT_S", 0.05)
    caplog.set_level("INFO")
    pauses: list[float] = []
    with real_api() as url:
        trainer = ApiClient(url, RUN, patience_s=5, sleep=pauses.append)
        trainer.register(0)
        with pytest.raises(ApiError, match="no batch"):
            trainer.fetch_batch(1)
    assert 10 < len(pauses) < 25
    assert pauses[:10] == [0.0] * 10
    (waiting,) = (line for line in caplog.messages if "a batch" in line)
    assert "0 of 2 rollouts of the next batch have arrived; no environment is registered" in waiting


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_wait_at_once(number: int, raised: type[BaseException]) -> None:
    before = signal.signal(signal.SIGTERM, grpo._terminate)
    try:
        with real_api() as url:
            trainer, _ = trainer_of(url)
            alarm = threading.Timer(0.5, os.kill, (os.getpid(), number))
            alarm.start()
            start = time.monotonic()
            with pytest.raises(raised):
                trainer.fetch_batch(30)
            assert time.monotonic() - start < 2
            trainer.close()
    finally:
        signal.signal(signal.SIGTERM, before)
