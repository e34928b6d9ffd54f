"""A group says how its sequences were sampled, in any environment; what contradicts it is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atroposlib.envs.authors.author_errors import MalformedGroup
from atroposlib.envs.base import BaseEnv, ScoredDataGroup
from atroposlib.envs.errors import NotReplayed
from atroposlib.envs.question_env import Rollout
from atroposlib.envs.rollouts import rollout_group
from atroposlib.envs.server_handling.sequences.sampling import settings_of
from atroposlib.envs.server_handling.sequences.sampling_ledger import SampledLedger
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.wire.batching import GroupRequirements, ScoredData
from example_trainer.data.batching import make_batch
from tests.unit.environments.support import running_env
from tests.unit.envs.fakes import Asking, CountingEnv

OWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}


class OwnSampling(Asking):
    """Samples each rollout with the next of `settings`, whatever it is configured with."""

    name = "own"
    settings: tuple[dict[str, Any], ...] = (OWN,)

    async def score(self, item: str, answer: str) -> float:
        return float(len(answer) % 3)

    async def rollouts(self, item: Any, n: int, split: Any, temperature: float, top_p: float) -> list[Rollout]:
        self.count = getattr(self, "count", -1) + 1
        asked = self.settings[self.count % len(self.settings)]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=self.prompt(item), max_tokens=4, split=split, **asked)
            return [Rollout("7", self.prompt(item), managed.get_state()["nodes"])]


class Legacy(BaseEnv):
    """Of the ancestor's kind: it puts the lists of nodes into a group, and says `said` of its sampling."""

    name = "legacy"
    asked: tuple[Mapping[str, Any], ...] = (OWN,) * 4
    said: Mapping[str, Any] = {}
    cut: int | None = None
    through: str = "managed"

    async def get_next_item(self) -> int:
        return 1

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None

    async def collect_trajectories(self, item: Any) -> tuple[ScoredDataGroup, list[Any]]:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for index, settings in enumerate(self.asked):
            tokens, masks, logprobs = await self._sampled(index, settings)
            group["tokens"].append(tokens[: self.cut])
            group["masks"].append(masks[: self.cut])
            group["inference_logprobs"].append(logprobs[: self.cut])  # type: ignore[union-attr]
            group["scores"].append(float(index))
        group.update(self.said)  # type: ignore[typeddict-item]
        return group, []

    async def _sampled(self, index: int, settings: Mapping[str, Any]) -> tuple[list[int], list[int], list[float]]:
        if self.through == "tokens":
            prompt, (ids,), (logprobs,), _ = await self.server.tokens_and_logprobs_completion(
                input_ids=self.tokenizer.encode(f"Say {index}"), max_tokens=6, **settings
            )
            return prompt + ids, [-100] * len(prompt) + ids, [1.0] * len(prompt) + logprobs
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = [{"role": "user", "content": f"Say {index}"}]
            await managed.chat_completion(messages=messages, max_tokens=6, **settings)
            (node,) = managed.get_state()["nodes"]
        return node.tokens, node.masked_tokens, node.logprobs


class Taken(Legacy):
    """Keeps the groups that are sent."""

    async def _before_sending(self, group: ScoredDataGroup) -> ScoredDataGroup:
        self.sent = [*getattr(self, "sent", []), group]
        return group


async def taken(folder: Path, trainable_only: bool = False, **attributes: Any) -> ScoredDataGroup:
    """The group that a `Taken` with these attributes sends, to our trainer if it is `trainable_only`."""
    kind = type("Changed", (Taken,), attributes)
    async with FakeInferenceServer() as server, running_env_of_base(kind, folder, server) as env:
        env._env_run.needs = GroupRequirements(trainable_only=trainable_only)
        group, _ = await env.collect_trajectories(1)
        await env._env_run.take(group, 1, send=False, limit_lengths=False)
        sent: ScoredDataGroup = env.sent[0]
        return sent


def running_env_of_base(kind: type[Any], folder: Path, server: FakeInferenceServer) -> Any:
    kind.env_config_cls = type("Config", (BaseEnv.env_config_cls,), {"model_config": {"extra": "ignore"}})
    return running_env(kind, folder, server)


def said(group: Mapping[str, Any]) -> list[tuple[float, float, int]]:
    """What the trainer reads of each sequence."""
    record = msgspec.convert({name: value for name, value in group.items() if name != "rewards"}, ScoredData)
    record = msgspec.structs.replace(record, advantages=[[1.0]] * len(record.tokens))
    batch = make_batch([record], seq_len=512, policy_version=0)
    assert not batch.rejected
    return [(each.temperature, each.top_p, each.top_k) for each in batch.sequences]


async def test_rollouts_of_an_authors_own_sampling_say_so(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(OwnSampling, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
        assert {name: server.requests[0][1][name] for name in OWN} == OWN
    assert group is not None
    assert group["generation_params"] == OWN
    assert said(group) == [(0.7, 0.9, 20)] * 4


async def test_rollouts_that_were_sampled_differently_say_it_one_by_one(tmp_path: Path) -> None:
    class OneByOne(OwnSampling):
        settings = (OWN, {"temperature": 1.2}, {"temperature": 0.0}, {})

    async with FakeInferenceServer() as server, running_env(OneByOne, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert not group.get("generation_params")
    # greedy sampling has the log-probabilities of temperature 1
    assert sorted(said(group)) == sorted([(0.7, 0.9, 20), (1.2, 1.0, 0), (1.0, 1.0, 0), (1.0, 1.0, 0)])


@pytest.mark.parametrize("through", ["managed", "tokens"])
@pytest.mark.parametrize("cut", [None, -1], ids=["whole", "cut"])
async def test_a_group_of_lists_gets_what_was_sampled(tmp_path: Path, through: str, cut: int | None) -> None:
    group = await taken(tmp_path, through=through, cut=cut)
    assert said(group) == [(0.7, 0.9, 20)] * 4


async def test_a_group_of_lists_gets_it_of_each_sequence(tmp_path: Path) -> None:
    asked = ({"temperature": 0.5}, {"temperature": 1.0}, {"top_p": 0.8}, {"extra_body": {"top_k": 5}})
    group = await taken(tmp_path, asked=asked)
    assert said(group) == [(0.5, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.8, 0), (1.0, 1.0, 5)]


async def test_an_authors_true_field_is_kept_and_completed(tmp_path: Path) -> None:
    group = await taken(tmp_path, said={"generation_params": {"temperature": 0.7, "max_tokens": 6}})
    assert group["generation_params"] == {"temperature": 0.7, "max_tokens": 6}
    assert said(group) == [(0.7, 0.9, 20)] * 4


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_params": {"temperature": 1.0}},
        {"group_overrides": {"temperature": 1.0}},
        {"overrides": [{}, {"temperature": 1.0}, {}, {}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_field_that_contradicts_what_was_sampled_is_refused_with_both_values(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(MalformedGroup, match=r"temperature 1.0, but it was sampled with temperature 0.7"):
        await taken(tmp_path, said=fields)


async def test_samples_of_an_evaluation_are_refused_if_the_trainer_does_not_replay_them(
    tmp_path: Path,
) -> None:
    with pytest.raises(MalformedGroup, match=r"min_p"):
        await taken(tmp_path, trainable_only=True, asked=({"split": "eval", "min_p": 0.2},) * 4)


async def test_turns_of_one_sequence_that_were_sampled_differently_are_refused(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(OwnSampling, tmp_path, server) as env:
        messages = [{"role": "user", "content": "?"}]
        async with env.server.managed_server(tokenizer=env.tokenizer) as managed:
            reply = await managed.chat_completion(messages=messages, max_tokens=4, temperature=0.7)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}, messages[0]]
            await managed.chat_completion(messages=messages, max_tokens=4, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        assert len(nodes) == 1
        with pytest.raises(NotReplayed, match=r"one turn was sampled with temperature 0.7, another with 1.0"):
            rollout_group([Rollout("", messages, nodes)], [1.0])
        node = nodes[0]
        lists = ScoredDataGroup(
            tokens=[node.tokens] * 4,
            masks=[node.masked_tokens] * 4,
            scores=[0.0, 1.0, 2.0, 3.0],
            inference_logprobs=[node.logprobs] * 4,
        )
        with pytest.raises(MalformedGroup, match=r"sequence 0: one turn .* 0.7, another with 1.0"):
            await env._env_run.take(lists, "7", send=False, limit_lengths=False)
        first_masked = [*node.masked_tokens]
        start = next(place for place, value in enumerate(first_masked) if value != -100)
        while first_masked[start] != -100:
            first_masked[start], start = -100, start + 1
        lists["masks"] = [first_masked] * 4
        await env._env_run.take(lists, "7", send=False, limit_lengths=False)


def test_the_ledger_forgets_the_oldest_and_knows_a_cut_completion() -> None:
    ledger = SampledLedger(kept=2)
    for number in range(4):
        ids = list(range(100 * number, 100 * number + 20))
        ledger.record([1, 2], ids, [-0.5] * 20, settings_of({"temperature": 1 + number}), trained=True)
    of = [
        ledger.settings_of(ids[:12], ids[:12], [-0.5] * 12)
        for ids in (list(range(100 * number, 100 * number + 20)) for number in range(4))
    ]
    assert [[each["temperature"] for each in found] for found in of][2:] == [[3.0], [4.0]]
    assert ledger.settings_of([9, 8], [9, 8], [-0.5, -0.5]) == []  # several settings: it is not guessed


def test_the_servers_defaults_are_filled_in_as_they_are() -> None:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert settings_of({}) == settings_of({"top_k": -1, "temperature": None}) == plain
    assert settings_of({"temperature": 0.0, "top_p": 0.9, "top_k": 5}) == plain | {"temperature": 0.0}
    assert settings_of({"temperature": 0.001}, 0.01)["temperature"] == 0.01  # vLLM's least
    assert settings_of({"extra_body": {"min_p": 0.1, "top_k": 3}}) == plain | {"min_p": 0.1, "top_k": 3}
    assert settings_of({"repetition_penalty": 1.0, "logit_bias": {}}) == plain


async def test_an_environment_of_the_default_sampling_says_nothing_new(tmp_path: Path) -> None:
    kind = type("Plain", (CountingEnv,), {})
    async with FakeInferenceServer() as server, running_env_of_base(kind, tmp_path, server) as env:
        group, _ = await env.collect_trajectories(1)
        found, defect = env._env_run._with_settings(group)
    assert defect is None
    assert (found["generation_params"], found.get("overrides")) == ({"temperature": 1.0}, None)
