"""A run with --env.deterministic: the same groups in the same places, whatever is late, fails or starts again."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.serve import serve
from atroposlib.envs.errors import EnvError, WrongSetting
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout
from atroposlib.envs.run import order
from atroposlib.envs.run.order import post_key
from atroposlib.envs.server_handling.dispatching.request_seeds import RequestSeeds, seeded, with_seed
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import Api, Asking, CountingEnv, Trainer, config, running_api, server_config

pytestmark = pytest.mark.timeout(60)

STEPS = 3


class Seeded(FakeInferenceServer):
    """Answers by the seed, as a real server does, and each request after another while."""

    def __init__(self, order_of_replies: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._late = random.Random(order_of_replies)

    def _sample(self, prompt_ids: list[int], body: dict[str, Any]) -> list[tuple[list[int], str]]:
        texts = [str((body["seed"] + index) % 9973) for index in range(body.get("n") or 1)]
        return [self._tokens(text, 8) for text in texts]

    async def _generate(self, request: Any) -> Any:
        await asyncio.sleep(self._late.random() / 50)
        return await super()._generate(request)


class Repeatable(Asking):
    """Rewards depend on question and answer alone. Two questions of three give every answer a 0."""

    def score(self, item: str, answer: str, *args: Any, **kwargs: Any) -> float:
        number = int("0" + "".join(letter for letter in answer if letter.isdigit()))
        return float(number % 2) if int(item) % 3 == 0 else 0.0


class Single(Repeatable):
    """Asks for its answers one by one, in two turns."""

    async def rollouts(self, item: Any, n: int, split: Any, temperature: float, top_p: float) -> list[Rollout]:
        messages = self.conversation(item)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(2):
                asked = dict(max_tokens=8, temperature=temperature, top_p=top_p, split=split)
                reply = await managed.chat_completion(messages=messages, **asked)
                said = {"role": "assistant", "content": reply.choices[0].message.content}
                messages = [*messages, said, {"role": "user", "content": "Again."}]
            nodes = managed.get_state()["nodes"]
        return [Rollout(str(said["content"]), messages[:-1], nodes)]


def settings(folder: Path, api: Api, **fields: Any) -> QuestionEnvConfig:
    plain = config(folder, api.url, steps_per_eval=0, max_batches_offpolicy=0).model_dump()
    asked = {"deterministic": True, "ensure_scores_are_not_same": False, "seed": 5, "max_new_tokens": 8}
    return QuestionEnvConfig(**plain | asked | fields)


def kept(batch: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What has to be equal of a batch, in the order of the groups' places."""
    found = [(each["ordinal"], each["tokens"], each["scores"], each["inference_logprobs"]) for each in batch]
    return sorted(found)


async def groups_of(
    folder: Path,
    replies: int,
    cls: type[QuestionEnv] = Repeatable,
    disturb: Callable[[int, Seeded], None] = lambda step, server: None,
    stop_at: int | None = None,
    **fields: Any,
) -> list[list[tuple[Any, ...]]]:
    """Each batch of a run. `disturb` is called when a batch has been taken; at `stop_at` the environment is cancelled
    in the middle of the next one, and another process of it starts.
    """
    inference = Seeded(replies)
    async with running_api() as api, inference:

        def start() -> "asyncio.Task[None]":
            return asyncio.create_task(serve(cls(settings(folder, api, **fields), server_config(inference))))

        serving = start()
        trainer = Trainer(api.url, batch_size=16, num_steps=STEPS)  # four groups
        trainer.registration["run"] = "a run"
        await trainer.register()

        async def on_step(step: int) -> None:
            nonlocal serving
            inference.policy_version = step + 1
            disturb(step, inference)
            if step == stop_at:
                trainer.step += 1
                await trainer.report()
                await api.answers("/scored_data", 2)
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                serving = start()
                trainer.step -= 1

        await trainer.train(STEPS, on_step)
        await asyncio.wait_for(serving, 20)
    return [kept(batch) for batch in trainer.batches]


async def test_what_comes_first_does_not_matter(tmp_path: Path) -> None:
    one, other = [await groups_of(tmp_path, replies) for replies in (1, 2)]
    assert one == other
    assert [[each[0] for each in batch] for batch in one] == [
        [["asking", step, number] for number in range(4)] for step in range(STEPS)
    ]
    assert await groups_of(tmp_path, 1, seed=6) != one


async def test_answers_that_are_asked_one_by_one_keep_their_places(tmp_path: Path) -> None:
    one, other = [await groups_of(tmp_path, replies, Single) for replies in (1, 2)]
    assert one == other
    tokens = [row for batch in one for _, rows, *_ in batch for row in rows]
    assert len({tuple(row) for row in tokens}) == len(tokens)  # samples of one question have seeds of their own


async def test_a_batch_that_is_filled_until_it_has_a_signal_is_the_same_again(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"ensure_scores_are_not_same": True, "max_items_per_batch": 9, "max_num_workers": 5}
    one, other = [await groups_of(tmp_path, replies, **fields) for replies in (1, 2)]
    assert one == other
    numbers = [[each[0][2] for each in batch] for batch in one]
    assert all(len(each) == 4 for each in numbers)
    assert numbers != [[0, 1, 2, 3]] * STEPS


@pytest.mark.parametrize("cls", [Repeatable, Single])
async def test_an_environment_that_starts_again_gives_what_it_would_have_given(
    tmp_path: Path, cls: type[QuestionEnv]
) -> None:
    assert await groups_of(tmp_path, 3, cls, stop_at=0) == await groups_of(tmp_path, 1, cls)


async def test_a_group_of_the_wrong_policy_or_of_a_failed_request_is_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(order, "PAUSE_S", 0.05)

    def disturb(step: int, server: Seeded) -> None:
        if step == 0:  # a trainer that resumes serves another version for a moment
            right, server.policy_version = server.policy_version, 7
            asyncio.get_running_loop().call_later(1.5, lambda: setattr(server, "policy_version", right))
        if step == 1:
            server.fail_next(1, status=400)

    assert await groups_of(tmp_path, 1, disturb=disturb) == await groups_of(tmp_path, 1)
    assert "sampled by versions [7], not by policy version 1 alone" in caplog.text
    assert "Asking again" in caplog.text


async def test_what_an_api_without_a_journal_has_lost_is_given_again(tmp_path: Path) -> None:
    async with running_api() as api, Seeded(1) as inference:
        serving = asyncio.create_task(serve(Repeatable(settings(tmp_path, api), server_config(inference))))
        trainer = Trainer(api.url, batch_size=16, num_steps=1)
        await trainer.register()
        await api.answers("/scored_data", 3)
        await api.stop()
        await api.start()
        await trainer.register()
        await trainer.train(1)
        await asyncio.wait_for(serving, 20)
    assert [kept(batch) for batch in trainer.batches] == (await groups_of(tmp_path, 1))[:1]


async def test_what_can_never_be_sampled_ends_the_environment_instead_of_leaving_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "PAUSE_S", 0.01)

    class Broken(Repeatable):
        def score(self, item: str, answer: str, *args: Any, **kwargs: Any) -> float:
            raise RuntimeError("no scorer")

    async with running_api() as api, Seeded(1) as inference:
        serving = asyncio.create_task(serve(Broken(settings(tmp_path, api), server_config(inference))))
        await Trainer(api.url, batch_size=16).register()
        with pytest.raises(EnvError, match=r"group \d of batch 0 failed 5 times within \d+ s, .*no scorer"):
            await asyncio.wait_for(serving, 20)


async def test_an_environment_that_cannot_be_repeated_is_named(tmp_path: Path) -> None:
    class Outside(Repeatable):
        deterministic = False

    async with running_api() as api, FakeInferenceServer() as inference:
        for cls in (Outside, CountingEnv):
            env = cls(settings(tmp_path, api), server_config(inference))
            with pytest.raises(WrongSetting, match=f"class {cls.__name__} is no QuestionEnv, or says"):
                await serve(env)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_batches_offpolicy": 2}, "max_batches_offpolicy 2"),
        ({"ensure_scores_are_not_same": True}, "max_items_per_batch"),
    ],
)
def test_settings_that_cannot_be_repeated_are_refused(tmp_path: Path, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        QuestionEnvConfig(deterministic=True, **{"max_batches_offpolicy": 0} | fields)


def test_a_request_has_a_seed_by_what_it_asks_for_whom_and_how_often() -> None:
    def asked(text: str = "a") -> int:
        return int(with_seed({"prompt": text, "n": 2})["seed"])

    with seeded(RequestSeeds(1, "env", 0, 3)):
        first = [asked(), asked(), asked("b")]
    with seeded(RequestSeeds(1, "env", 0, 3)):
        assert [asked(), asked(), asked("b")] == first
    with seeded(RequestSeeds(1, "env", 0, 4)):
        assert asked() not in first
    assert len(set(first)) == 3
    assert all(0 <= seed < 2**52 for seed in first)
    assert "seed" not in with_seed({"prompt": "a"})
    with seeded(RequestSeeds(1, "env", 0, 3)):
        assert with_seed({"seed": 9}) == {"seed": 9}


def test_a_place_is_posted_under_one_key_in_each_run() -> None:
    assert post_key("a", ("env", 1, 2)) == post_key("a", ("env", 1, 2))
    assert len({post_key("a", ("env", 1, 2)), post_key("b", ("env", 1, 2)), post_key("a", ("env", 2, 1))}) == 3
