import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from atroposlib.envs.commands.serve import serve
from atroposlib.envs.errors import GroupTooLargeError, PeerError
from atroposlib.envs.payloads import ScoredDataItem
from atroposlib.envs.run.api_link import ApiLink
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import Api, CountingEnv, Trainer, config, running_api, served, server_config
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop turns fifty times a second, not ten."""
    monkeypatch.setattr("atroposlib.envs.commands.serve.TURN_S", 0.02)


@dataclass
class Stage:
    """A directory, a batching API and an inference server."""

    folder: Path
    api: Api
    inference: FakeInferenceServer

    def env(self, cls: type[CountingEnv] = CountingEnv, **fields: Any) -> CountingEnv:
        return cls(config(self.folder, self.api.url, **fields), server_config(self.inference))

    async def run(self, env: CountingEnv, steps: int) -> Trainer:
        """The environment serves a trainer until its last step."""
        return await served(env, Trainer(self.api.url, num_steps=steps), steps)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with running_api() as api, FakeInferenceServer() as server:
        yield Stage(tmp_path, api, server)


async def test_run_from_registration_to_the_last_evaluation(stage: Stage) -> None:
    files: dict[str, Any] = {
        "evaluations_path": str(stage.folder / "e.jsonl"),
        "metrics_path": str(stage.folder / "m.jsonl"),
        "eval_at_start": True,
    }
    env = stage.env(data_path_to_save_groups=str(stage.folder / "s.jsonl"), **files)
    trainer = Trainer(stage.api.url, num_steps=3)
    serving = asyncio.create_task(serve(env))
    await trainer.register()
    await trainer.joined()
    await trainer.evaluation(0)
    await trainer.train(3)
    await asyncio.wait_for(serving, 10)

    assert trainer.accuracies == {0: 0.5, 1: None, 2: 0.5, 3: 0.5}  # every second one, and the last
    evaluations = [json.loads(line) for line in (stage.folder / "e.jsonl").read_text().splitlines()]
    assert [(row["policy_version"], row["accuracy"]) for row in evaluations] == [(0, 0.5), (2, 0.5), (3, 0.5)]
    group = trainer.batches[0][0]
    assert group["policy_versions"] == [[0, 0]] * 4
    assert group["generation_params"] == {"temperature": 1.0}
    for tokens, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        assert [m for m in mask if m != -100] == tokens[-len([m for m in mask if m != -100]) :]
        assert all((logprob == 1.0) == (m == -100) for m, logprob in zip(mask, logprobs, strict=True))
    saved = [json.loads(line) for line in (stage.folder / "s.jsonl").read_text().splitlines()]
    assert saved[0]["tokens"] == group["tokens"]
    assert saved[0]["texts"][0].endswith("ok<|im_end|>")
    assert saved[0]["completion_tokens"] == [3] * 4
    figures = [json.loads(line) for line in (stage.folder / "m.jsonl").read_text().splitlines()]
    assert figures[-1]["counting_0_train/groups_accepted"] >= 6
    assert any(row.get("counting_0_train_perf/workers_added_per_attempt_max") == 2 for row in figures)
    assert any(0 < row.get("counting_0_train_perf/mainloop_timings_mean", 0) < 10 for row in figures)


@pytest.mark.parametrize("limit", [1, 2])
async def test_groups_in_flight_and_queued_never_exceed_the_limit(stage: Stage, limit: int) -> None:
    stage.inference.delay_s = 0.05
    env = stage.env(max_batches_offpolicy=limit, max_num_workers=64)
    trainer = Trainer(stage.api.url, batch_size=16, num_steps=10)
    serving = asyncio.create_task(serve(env))
    await trainer.register()

    async def full() -> bool:
        size: int = (await trainer.call("GET", "/status"))["queue_size"]
        return size >= limit * 16 // 4

    await until(full)
    await stage.api.turns()  # each could start one group too many
    await until(lambda: stage.inference.in_flight == 0)
    assert (await trainer.call("GET", "/status"))["queue_size"] == limit * 16 // 4
    assert env.taken == limit * 16 // 4
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_on_policy_samples_come_from_the_policy_they_train(stage: Stage) -> None:
    env = stage.env(max_batches_offpolicy=0)
    trainer = Trainer(stage.api.url, num_steps=4)
    serving = asyncio.create_task(serve(env))
    await trainer.register()

    async def train_slowly(step: int) -> None:
        await stage.api.turns()  # each could sample from the policy before
        stage.inference.policy_version = step + 1

    await trainer.train(4, train_slowly)
    await asyncio.wait_for(serving, 10)
    seen = [{tuple(span) for item in batch for span in item["policy_versions"]} for batch in trainer.batches]
    assert seen == [{(version, version)} for version in range(4)]


async def test_rollouts_of_one_to_three_sequences_make_batches_by_rollouts(stage: Stage) -> None:
    class Branching(CountingEnv):
        """Its n-th rollout has n % 3 + 1 sequences."""

        async def collect_trajectory(self, item: int) -> tuple[list[ScoredDataItem], list[Any]]:  # type: ignore[override]
            sample, more = await super().collect_trajectory(item)
            return [sample] * (self.samples % 3 + 1), more  # type: ignore[list-item]

    env = stage.env(Branching, data_path_to_save_groups=str(stage.folder / "s.jsonl"))
    trainer = await stage.run(env, 2)
    saved = [json.loads(line) for line in (stage.folder / "s.jsonl").read_text().splitlines()]
    for batch in trainer.batches:
        assert [item["rollouts"][-1] for item in batch] == [3, 3]  # two groups of four, of 8 sequences on average
        assert sum(len(item["tokens"]) for item in batch) == sum(len(item["rollouts"]) for item in batch) > 8
        assert all(item["rollouts"] in [group["rollouts"] for group in saved] for item in batch)
    assert len(saved[0]["completion_tokens"]) == 4


async def test_nothing_is_sampled_while_an_evaluation_runs(stage: Stage) -> None:
    class SlowEvaluation(CountingEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            before = self.taken
            if before == 0:  # that of the start; the loop has ended when the last one runs
                await stage.api.turns()
            assert self.taken == before
            return {"accuracy": 0.25}

    env = stage.env(SlowEvaluation, eval_at_start=True)
    trainer = Trainer(stage.api.url, num_steps=2)
    serving = asyncio.create_task(serve(env))
    await trainer.register()
    await trainer.train(2)
    await trainer.evaluation(0)
    await asyncio.wait_for(serving, 10)
    assert trainer.accuracies == {0: 0.25, 1: None, 2: 0.25}
    assert env._env_run.counts["evaluations_failed"] == 0


async def test_the_version_that_is_served_after_the_last_step_is_evaluated_under_its_own_number(stage: Stage) -> None:
    class Asking(CountingEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            run = self._env_run
            return {"accuracy": run.policy_version / 8} | ({"final_accuracy": 0.5} if run.is_last else {})

    env = stage.env(Asking, evaluations_path=str(stage.folder / "e.jsonl"))
    trainer = Trainer(stage.api.url, num_steps=3)
    trainer.registration["says_done"] = True
    serving = asyncio.create_task(serve(env))
    await trainer.register()
    await trainer.train(3)
    assert not serving.done()
    await trainer.call("POST", "/trainer-step", {"step": 3, "policy_version": 4, "weights_of": 2})
    await trainer.evaluation(4)
    assert not serving.done()
    await trainer.call("POST", "/trainer-step", {"step": 3, "policy_version": 4, "done": True})
    await asyncio.wait_for(serving, 10)
    assert trainer.accuracies == {1: None, 2: 0.25, 3: 0.375, 4: 0.5}
    rows = [json.loads(line) for line in (stage.folder / "e.jsonl").read_text().splitlines()]
    assert [(row["policy_version"], row["served_version"], row["accuracy"]) for row in rows] == [
        (2, 2, 0.25),
        (3, 3, 0.375),
        (2, 4, None),
    ]
    assert [row["metrics"].get("final_accuracy") for row in rows] == [None, 0.5, 0.5]


async def test_a_run_that_ends_early_ends_its_environments(stage: Stage) -> None:
    env = stage.env()
    trainer = Trainer(stage.api.url, num_steps=100)
    serving = asyncio.create_task(serve(env))
    await trainer.register()
    await trainer.train(2)
    await trainer.fetch()
    await trainer.call("POST", "/trainer-step", {"step": 3, "policy_version": 3, "num_steps": 3})
    await trainer.evaluation(3)
    await asyncio.wait_for(serving, 10)
    assert env.evaluated == [2, 3]


async def test_a_trainer_that_never_says_that_it_is_done_is_left(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    env = stage.env(startup_timeout=2)
    trainer = Trainer(stage.api.url, num_steps=1)
    trainer.registration["says_done"] = True
    await served(env, trainer, 1)
    assert "The trainer has not said within 2 s that it is done (--env.startup_timeout): leaving" in caplog.text


async def test_api_restart_loses_no_rollout_and_no_evaluation(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    env = stage.env()
    trainer = Trainer(stage.api.url, num_steps=4)
    serving = asyncio.create_task(serve(env))
    await trainer.register()
    stage.inference.delay_s = 0.5  # samples end while the API is away
    await trainer.train(2)
    await until(lambda: stage.inference.in_flight >= 4)
    done = env.samples
    await stage.api.stop()
    await until(lambda: env.samples >= done + 4)
    await stage.api.start()
    await trainer.register()
    await trainer.joined()
    await trainer.evaluation(2)
    await trainer.train(2)
    await asyncio.wait_for(serving, 20)
    assert trainer.accuracies[2] == trainer.accuracies[4] == 0.5
    assert env.evaluated == [2, 4]
    assert "Waiting for its status from " + stage.api.url in caplog.text
    assert "registering again" in caplog.text


async def test_failing_items_are_logged_with_traceback_and_counted_and_the_next_ones_go_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    class Flaky(CountingEnv):
        async def collect_trajectory(self, item: int) -> Any:
            if item == 1:
                raise ZeroDivisionError("the first item is bad")
            return await super().collect_trajectory(item)

    env = stage.env(Flaky)
    await stage.run(env, 1)
    assert env._env_run.counts["items_failed"] == 1
    assert "the first item is bad" in caplog.text
    assert "raise ZeroDivisionError" in caplog.text
    assert "Dropped the item 1 (1 failure(s) in a row, pausing 0.5 s): ZeroDivisionError" in caplog.text


async def test_a_group_of_which_a_sample_is_dropped_is_dropped_whole_and_its_later_items_stay(stage: Stage) -> None:
    """Also where the group names its own size, which the shorter one would have."""

    class Dropping(CountingEnv):
        async def collect_trajectory(self, item: int) -> Any:
            self.samples += 1
            sample = {
                "tokens": [5, 6],
                "masks": [-100, 6],
                "scores": float(self.samples),
                "inference_logprobs": [1.0, 0.0],
            }
            sized = sample | {"group_overrides": {"group_size": 3}}
            return (None if self.samples == 3 else sized), [self.samples]

    env = stage.env(Dropping)
    assert await env.collect_trajectories(1) == (None, [1, 2, 3, 4])
    group, later = await env.collect_trajectories(2)
    assert isinstance(group, dict)
    assert (group["scores"], later) == ([5.0, 6.0, 7.0, 8.0], [5, 6, 7, 8])


async def test_overdue_item_is_dropped(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(CountingEnv):
        async def collect_trajectory(self, item: int) -> Any:
            if item == 1:
                await asyncio.sleep(60)
            return await super().collect_trajectory(item)

    env = stage.env(Stuck, worker_timeout=0.5)
    await stage.run(env, 2)
    assert env._env_run.counts["items_timed_out"] >= 1  # a busy machine may be late with another
    assert "Dropped the item 1: 4 of its 4 rollouts failed (4 timeout): it took longer than 0.5 s" in caplog.text


async def test_backlog_goes_before_new_items(stage: Stage) -> None:
    class Branching(CountingEnv):
        handled: ClassVar[list[int]] = []

        async def collect_trajectories(self, item: int) -> Any:
            self.handled.append(item)
            group, _ = await super().collect_trajectories(item)
            return group, [item + 1000] if item < 1000 else []

    env = stage.env(Branching, max_num_workers=1)
    await stage.run(env, 1)
    assert Branching.handled[:2] == [1, 1001]


async def test_environment_that_cannot_reach_the_api_or_a_trainer_names_it_and_the_deadline(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    env = stage.env(startup_timeout=1)
    with pytest.raises(PeerError, match="no trainer has registered and asked for a batch"):
        await serve(env)
    env = stage.env(startup_timeout=1)
    await stage.api.stop()
    with pytest.raises(
        PeerError, match=rf"{stage.api.url} within 1 s .*; start it with `python -m atroposlib.cli.run_api`"
    ):
        await serve(env)
    assert f"from {stage.api.url}, 0 s of at most 1 s so far" in caplog.text
    await stage.api.start()


async def test_group_that_exceeds_the_batch_is_refused(stage: Stage) -> None:
    env = stage.env(group_size=16)
    serving = asyncio.create_task(serve(env))
    await Trainer(stage.api.url, batch_size=8).register()
    with pytest.raises(GroupTooLargeError, match="group_size 16 is larger than the trainer's batch of 8"):
        await asyncio.wait_for(serving, 10)


async def test_cancelled_environment_disconnects_within_seconds(stage: Stage) -> None:
    stage.inference.delay_s = 30
    env = stage.env()
    trainer = Trainer(stage.api.url, num_steps=2)
    serving = asyncio.create_task(serve(env))
    await trainer.register()
    await until(lambda: stage.inference.in_flight > 0)
    assert (await trainer.call("GET", "/evaluations?policy_version=2"))["pending"] == ["counting_0"]
    serving.cancel()
    await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), 5)
    assert (await trainer.call("GET", "/evaluations?policy_version=2"))["pending"] == []
    assert env.workers == set()


async def test_an_api_that_does_not_reply_to_the_goodbye_is_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atroposlib.envs.commands.serve.GOODBYE_LIMIT_S", 0.1)
    monkeypatch.setattr(ApiLink, "leave", lambda link: asyncio.sleep(60))
    env = stage.env()
    serving = asyncio.create_task(serve(env))
    await Trainer(stage.api.url).register()
    await until(lambda: env.taken > 0)
    serving.cancel()
    await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), 5)
    assert f"Left without disconnecting: {stage.api.url} did not reply within 0.1 s" in caplog.text


async def test_finished_run_is_not_taken_for_a_new_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.envs.commands.serve.REJOIN_S", 0.05)
    finished = Trainer(stage.api.url, num_steps=3, starting_step=3)
    await finished.register()
    env = stage.env()
    serving = asyncio.create_task(serve(env))
    await finished.joined()
    await finished.evaluation(3)
    await stage.api.answers("/register-env", 3)  # it looks again and again, and finds the same trainer
    assert not serving.done()
    trainer = Trainer(stage.api.url, num_steps=5, starting_step=3)
    await trainer.register()
    await trainer.train(2)
    await asyncio.wait_for(serving, 10)
    assert trainer.accuracies[5] == 0.5


async def test_new_trainer_during_a_run_is_followed(stage: Stage) -> None:
    env = stage.env()
    first = Trainer(stage.api.url, num_steps=10)
    serving = asyncio.create_task(serve(env))
    await first.register()
    await first.train(3)
    second = Trainer(stage.api.url, num_steps=2)
    await second.register()
    await second.train(2)
    await asyncio.wait_for(serving, 10)
    assert second.accuracies[2] == 0.5


async def test_an_evaluation_under_way_does_not_count_for_the_next_trainer(stage: Stage) -> None:
    ends = asyncio.Event()

    class Late(CountingEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            self.evaluated.append(self._env_run.policy_version)
            if len(self.evaluated) == 1:
                await ends.wait()
            return {"accuracy": 0.25 * len(self.evaluated)}

    env = stage.env(Late)
    first = Trainer(stage.api.url, num_steps=4)
    serving = asyncio.create_task(serve(env))
    await first.register()
    await first.train(1)
    await first.fetch()
    await first.call("POST", "/trainer-step", {"step": 2, "policy_version": 2})
    await until(lambda: env.evaluated == [2])
    resumed = Trainer(stage.api.url, num_steps=4, starting_step=1)
    await resumed.register()
    await resumed.joined(1)
    ends.set()
    await resumed.train(3)
    await asyncio.wait_for(serving, 10)
    assert resumed.accuracies == {2: 0.5, 3: None, 4: 0.75}


async def test_failed_evaluation_is_reported_without_accuracy_and_logged_in_full_once(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(CountingEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("cannot evaluate")

    monkeypatch.setattr("atroposlib.envs.commands.serve.EVALUATION_PAUSE_S", 0.0)
    env = stage.env(Broken)
    trainer = await stage.run(env, 2)
    assert trainer.accuracies[2] is None
    assert env._env_run.counts["evaluations_failed"] == 3
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.exc_info is not None for record in errors] == [True, False]
    where = rf"ValueError: cannot evaluate at {re.escape(__file__)}:\d+ in evaluate"
    assert re.fullmatch(rf"The evaluation of policy version 2 failed \(try 1 of 3\): {where}", errors[0].getMessage())
    assert re.search(rf"no accuracy: {where} \(the same error 2 more times\)$", errors[1].getMessage())


async def test_ancestor_style_evaluation_reports_what_it_logged(stage: Stage) -> None:
    class Ancestral(CountingEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await self.evaluate_log({"eval/percent_correct": 0.75}, samples=[{"q": 1}], start_time=1.0, end_time=3.0)

    env = stage.env(Ancestral, data_dir_to_save_evals=str(stage.folder / "evals"))
    trainer = await stage.run(env, 1)
    assert trainer.accuracies == {1: 0.75}
    written = json.loads((stage.folder / "evals/metrics.json").read_text())
    assert written["results"]["all"] == written["results"]["atropos|counting_eval|0"] == {"eval/percent_correct": 0.75}
    assert written["config_general"]["total_evaluation_time_seconds"] == 2.0
    assert (stage.folder / "evals/samples.jsonl").read_text() == '{"q":1}\n'
    assert len((stage.folder / "evals/evaluations.jsonl").read_text().splitlines()) == 1


async def test_metrics_and_checkpoints_that_fail_cost_themselves_alone(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(CountingEnv):
        async def wandb_log(self, wandb_metrics: Any = None) -> None:
            await super().wandb_log({"mean": sum([]) / len([])})

        def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
            super().save_checkpoint(step, {"taken": object()})

        def postprocess_histories(self, trajectories: Any) -> Any:  # as plain functions
            return trajectories

        def cleanup(self) -> None:  # type: ignore[override]
            return

    trainer = Trainer(stage.api.url, num_steps=2)
    trainer.registration |= {"checkpoint_dir": str(stage.folder / "run"), "save_checkpoint_interval": 1}
    await served(stage.env(Failing), trainer, 2)
    assert trainer.accuracies == {1: None, 2: 0.5}
    assert "wandb_log failed, and its metrics are missing; the run continues: ZeroDivisionError" in caplog.text
    assert "save_checkpoint of step 1 failed; the run continues with the previous checkpoint: TypeError" in caplog.text


async def test_checkpoint_is_written_at_its_steps_and_read_when_a_run_goes_on(stage: Stage) -> None:
    class Remembering(CountingEnv):
        def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
            super().save_checkpoint(step, {"taken": self.taken, "levels": {1: 0.5}})

    trainer = Trainer(stage.api.url, num_steps=2)
    trainer.registration |= {"checkpoint_dir": str(stage.folder / "run"), "save_checkpoint_interval": 2}
    env = stage.env(Remembering)
    await served(env, trainer, 2)
    path = stage.folder / "run/env_checkpoints/counting_0/step-2.json"
    kept = json.loads(path.read_text())
    taken = kept["taken"]
    assert taken >= 4
    assert kept["levels"] == {"1": 0.5}

    await stage.api.stop()
    await stage.api.start()
    trainer.registration["num_steps"] = 3
    resumed = stage.env(Remembering)
    await served(resumed, trainer, 1)
    assert resumed.taken > taken
