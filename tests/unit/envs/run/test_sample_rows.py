"""samples.jsonl has a row for each group that was sampled, and held_out.jsonl one for each answer of an evaluation."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atroposlib.clients.batching_api import ApiRefused
from atroposlib.envs.authors.author_errors import MalformedGroup
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.files.html_report import write_html
from atroposlib.envs.question_env import QuestionEnv, Scored
from atroposlib.groups import group_id
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.wire.batching import GroupRequirements
from tests.unit.environments.support import env_class, running_env
from tests.unit.envs.fakes import Asking, CountingEnv, config, server_config


def test_a_group_is_named_by_its_tokens_alone() -> None:
    assert group_id([[1, 2], [3]]) == "dc931137287e2d4c"
    assert group_id(((1, 2), (3,))) == group_id([[1, 2], [3]])
    others: tuple[list[list[int]], ...] = ([[1, 2, 3]], [[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[]], [])
    names = {group_id(tokens) for tokens in others}
    assert len(names) == 6
    with pytest.raises((OverflowError, ValueError, TypeError)):
        group_id([[2**64]])


class EchoEnv(Asking):
    """Right is to repeat the number."""

    name = "echo"

    async def score(self, item: str, answer: str) -> float | Scored | None:
        return None if answer == "?" else Scored(float(item in answer), "said")

    def reference_answer(self, item: str) -> str:
        return item


class Link:
    """Takes groups as the batching API does."""

    env_id = 0

    def __init__(self, refusal: str = "") -> None:
        self.posted: list[Any] = []
        self.refusal = refusal

    async def post_groups(self, bodies: list[Any]) -> None:
        if self.refusal:
            raise ApiRefused(self.refusal, 422)
        self.posted += bodies


@asynccontextmanager
async def served(
    folder: Path, answers: list[str], env_cls: type[QuestionEnv] = EchoEnv, refusal: str = "", **fields: Any
) -> AsyncIterator[Any]:
    """An environment as under `serve`, over a model that gives these answers."""
    path = str(folder / "samples.jsonl")
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(env_cls, folder, server, data_path_to_save_groups=path, **fields) as env,
    ):
        env._env_run.link = Link(refusal)  # type: ignore[assignment]
        yield env


def rows(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


async def test_a_row_names_its_group_and_when_it_was_sampled(tmp_path: Path) -> None:
    start = time.time()
    async with served(tmp_path, ["7", "8"]) as env:
        await env.handle_env("7")
        posted = env._env_run.link.posted[0]
    (row,) = rows(tmp_path)
    assert row["group"] == group_id(row["tokens"]) == group_id(posted.tokens)
    assert (row["env"], row["reference"], row["dropped"], row["failures"]) == ("echo", "7", None, [])
    assert start <= row["started"] < row["time"] <= time.time()
    assert row["scores"] == [1.0, 0.0, 1.0, 0.0]
    assert [each[-1]["content"] for each in row["messages"]] == ["7", "8", "7", "8"]
    assert list(row).index("group") < list(row).index("tokens")  # a reader of the small fields need not read the lists


async def test_a_group_of_equal_scores_has_a_row_with_the_reason(tmp_path: Path) -> None:
    async with served(tmp_path, ["8"]) as env:
        await env.handle_env("7")
        assert env._env_run.link.posted == []
    (row,) = rows(tmp_path)
    assert (row["dropped"], row["scores"]) == ("all scores are 0", [0.0] * 4)
    assert row["group"] == group_id(row["tokens"])


async def test_an_answer_that_could_not_be_scored_is_kept_with_its_cause(tmp_path: Path) -> None:
    async with served(tmp_path, ["7", "?", "8", "8"]) as env:
        await env.handle_env("7")
    (row,) = rows(tmp_path)
    assert (row["dropped"], row["failed"], row["scores"]) == (None, {"scorer": 1}, [1.0, 0.0, 0.0])
    (failure,) = row["failures"]
    assert (failure["cause"], failure["messages"][-1]["content"]) == ("scorer", "?")


async def test_a_group_whose_every_rollout_failed_has_a_row_with_its_prompt(tmp_path: Path) -> None:
    async with served(tmp_path, ["?"]) as env:
        await env.handle_env("7")
    (row,) = rows(tmp_path)
    assert row["dropped"].startswith(
        "4 of its 4 answers could not be scored: score has returned None for 1 of 1 answers so far"
    )
    assert (row["group"], row["scores"], row["tokens"], row["failed"]) == (None, None, [], {"scorer": 4})
    assert row["prompt"] == [{"role": "user", "content": "Say 7."}]
    assert [failure["messages"][-1]["content"] for failure in row["failures"]] == ["?"] * 4


async def test_an_item_that_raises_has_a_row_that_names_the_line(tmp_path: Path) -> None:
    class Broken(EchoEnv):
        def prompt(self, item: str) -> list[dict[str, Any]]:
            raise ZeroDivisionError("of mine")

    async with served(tmp_path, ["7"], Broken) as env:
        with pytest.raises(ZeroDivisionError):
            await env.handle_env("7")
    (row,) = rows(tmp_path)
    assert row["dropped"].startswith("ZeroDivisionError: of mine at ")
    assert (row["prompt"], row["reference"], row["scores"]) == (None, "7", None)


async def test_a_group_that_no_trainer_can_use_has_a_row_whatever_it_holds(tmp_path: Path) -> None:
    malformed: list[dict[str, Any]] = [
        {"tokens": [[1, 2]] * 4, "masks": [[-100, 2]] * 4, "scores": [1.0, float("nan"), 0.0, 0.0]},
        {"tokens": [[1, 2**70]] * 4, "masks": [[-100, 2]] * 4, "scores": [1.0, 0.0, 0.0, 0.0]},
        {"scores": [1.0, 0.0, 0.0, 0.0]},
    ]
    async with served(tmp_path, ["7"]) as env:
        env._env_run.needs = GroupRequirements(trainable_only=True)
        for group in malformed:
            with pytest.raises(MalformedGroup):
                await env.handle_send_to_api(group, "7")
    found = rows(tmp_path)
    assert [row["dropped"].partition(":")[0] for row in found] == ["it cannot be trained on"] * 3
    assert found[0]["tokens"] == [[1, 2]] * 4
    assert (found[1]["tokens"], bool(found[1]["unwritable"])) == ([], True)


async def test_what_an_author_adds_that_is_not_json_costs_its_row_that_field_and_no_group(tmp_path: Path) -> None:
    class Adding(EchoEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            messages = [[{"role": "user", "content": "half \ud83d"}]] * 4
            return {**trajectories, "messages": messages, "made_by": Path("mine"), "also": 3}

    async with served(tmp_path, ["7", "8"], Adding) as env:
        await env.handle_env("7")
        assert env._env_run.counts["groups_accepted"] == 1
    (row,) = rows(tmp_path)
    assert (row["dropped"], row["also"], row["messages"][0][0]["content"]) == (None, 3, "half \\ud83d")
    assert "made_by" not in row
    assert "PosixPath" in row["unwritable"]


async def test_a_group_that_the_api_refused_has_a_second_row_that_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, ["7", "8"], refusal="no such trainer") as env:
        with pytest.raises(MalformedGroup):
            await env.handle_env("7")
    first, second = rows(tmp_path)
    assert first["group"] == second["group"]
    assert first["dropped"] is None
    assert second["dropped"].startswith("the API refused it: ")


async def test_dynamic_sampling_gives_each_group_one_row_with_its_own_times(tmp_path: Path) -> None:
    """Two of equal scores are held, one of which fills the batch; the other is thrown away, or left at the end."""
    answers = ["8"]
    async with served(tmp_path, answers, max_items_per_batch=3, batch_size=4, max_batches_offpolicy=1) as env:
        env.status_dict = {"unallocated_fraction": 1.0}
        await env.handle_env("5")
        await asyncio.sleep(0.01)
        await env.handle_env("6")
        answers[:] = ["7", "8"]
        await env.handle_env("7")
        answers[:] = ["8"]
        await env.handle_env("4")
        assert len(env._env_run.link.posted) == 1
    found = {row["reference"]: row for row in rows(tmp_path)}
    assert len(found) == len(rows(tmp_path)) == 4
    reasons = {item: row["dropped"] for item, row in found.items()}
    ended = "the run ended before its batch was full"
    assert reasons == {"5": "all scores are 0", "6": "all scores are 0", "7": None, "4": ended}
    assert found["5"]["time"] < found["6"]["started"]


async def test_process_writes_data_to_train_on_and_nothing_that_was_dropped(tmp_path: Path) -> None:
    async with served(tmp_path, ["8"]) as env:
        env._env_run.link = None
        await env.handle_env("7")
    assert not (tmp_path / "samples.jsonl").exists()  # nor an empty file


async def test_an_error_in_what_only_the_record_needs_loses_no_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Taken(EchoEnv):
        reference_answer = "an author's own attribute"  # type: ignore[assignment]

    async with served(tmp_path, ["7", "8"], Taken) as env:
        await env.handle_env("7")
        await env.handle_env("7")
    assert [(row["reference"], row["dropped"]) for row in rows(tmp_path)] == [(None, None)] * 2
    assert caplog.text.count("reference_answer failed; the rows go without what it gives") == 1


async def test_the_ancestors_environments_have_rows_without_a_reference(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        env = CountingEnv(
            config(tmp_path, "", data_path_to_save_groups=str(tmp_path / "samples.jsonl")), server_config(server)
        )
        async with env._env_run as run:
            run.link = Link()  # type: ignore[assignment]
            await env.handle_env(3)
    (row,) = rows(tmp_path)
    assert (row["env"], row["reference"], row["dropped"], len(row["texts"])) == ("counting", None, None, 4)


def test_a_page_of_samples_shows_dropped_groups(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    lost: dict[str, Any] = {"scores": None, "tokens": [], "messages": None, "dropped": "it was <late>"}
    equal = {"scores": [0.0], "messages": [[{"role": "assistant", "content": "8"}]], "dropped": "all scores are 0"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (lost, equal)))
    write_html(path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Group 0: 0 samples, mean score 0.000, dropped: it was &lt;late&gt;" in page
    assert "Group 1: 1 samples, mean score 0.000, dropped: all scores are 0" in page


@pytest.mark.parametrize(
    "module", ["calculator_tool", "countdown", "gsm8k", "letter_counting", "math", "self_check", "template"]
)
def test_every_environment_of_ours_knows_its_answers(module: str) -> None:
    env_cls: Any = env_class(f"{module}_server")
    inherited = env_cls.reference_answer is QuestionEnv.reference_answer
    assert inherited is (module in ("gsm8k", "math", "self_check"))  # whose items are Problems
    assert issubclass(env_cls, BaseEnv)


# --- held-out answers -----------------------------------------------------------------------------------------------


async def test_each_answer_of_an_evaluation_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    async with served(tmp_path, ["1"], held_out_path=str(path)) as env:
        await env.evaluate()
        env._env_run.write_held_out(4)
        await env.evaluate()
        env._env_run.write_held_out(5)
    found = rows(tmp_path, path.name)
    assert [(row["policy_version"], row["index"], row["score"]) for row in found] == [
        (4, 0, 1.0),
        (4, 1, 0.0),
        (5, 0, 1.0),
        (5, 1, 0.0),
    ]
    assert found[1]["messages"] == [
        {"role": "user", "content": "Say 2."},
        {"role": "assistant", "content": "1"},
    ]
    known = ("env", "reference", "outcome", "finish_reason")
    assert [found[1][name] for name in known] == ["echo", "2", "said", "stop"]


async def test_samples_that_an_author_gives_to_evaluate_log_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    async with FakeInferenceServer() as server:
        env = CountingEnv(config(tmp_path, "", held_out_path=str(path)), server_config(server))
        async with env._env_run as run:
            samples: list[Any] = [{"score": 1, "messages": [], "seen": tmp_path}, {"q": 1}]
            await env.evaluate_log({"accuracy": 0.5}, samples=samples, verbose=False)
            run.write_held_out(2)
            run.write_held_out(3)  # nothing new
    first, second = rows(tmp_path, path.name)
    assert (first["index"], first["score"], first["messages"], first["sample"]["seen"]) == (0, 1, [], str(tmp_path))
    assert (second["index"], second["score"], second["sample"], second["policy_version"]) == (1, None, {"q": 1}, 2)


HALF = "\ud800"  # of a surrogate pair: JSON in an answer may hold it, UTF-8 cannot


async def test_a_question_with_half_a_surrogate_pair_is_asked_and_posted_with_its_messages(tmp_path: Path) -> None:
    class Halved(EchoEnv):
        def prompt(self, item: str) -> list[dict[str, Any]]:
            return [{"role": "user", "content": f"{HALF} {item}", "name": HALF}]

    async with served(tmp_path, ["7", "8", "8", "7"], Halved, include_messages=True) as env:
        await env._leave_out_long(env._env_run.data, 5, "of the trainer", held_out_too=True)
        await env.handle_env("7")
        (posted,) = env._env_run.link.posted
    assert msgspec.json.decode(msgspec.json.encode(posted.messages))[0][0] == {
        "role": "user",
        "content": "\\ud800 7",
        "name": "\\ud800",
    }
    assert rows(tmp_path)[0]["scores"] == [1.0, 0.0, 0.0, 1.0]


async def test_an_error_that_quotes_half_a_surrogate_pair_loses_no_group(tmp_path: Path) -> None:
    class Quoting(EchoEnv):
        async def score(self, item: str, answer: str) -> float | Scored | None:
            if answer == "?":
                raise ValueError(f"{HALF} is not a number")
            return await super().score(item, answer)

    async with served(tmp_path, ["7", "?", "8", "8"], Quoting) as env:
        await env.handle_env("7")
        assert len(env._env_run.link.posted) == 1
        env._env_run.link.refusal = f"{HALF} is no group"
        with pytest.raises(MalformedGroup):
            await env.handle_env("7")
    accepted, refused = rows(tmp_path)[0], rows(tmp_path)[-1]
    (failure,) = accepted["failures"]
    assert (accepted["scores"], failure["cause"]) == ([1.0, 0.0, 0.0], "scorer")
    assert "\\ud800 is not a number" in failure["error"]
    assert "\\ud800 is no group" in refused["dropped"]
