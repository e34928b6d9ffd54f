# ruff: noqa: UP006, UP035, UP045
"""An environment in the manner of the archived ancestor, unchanged: names, signatures and habits as authors out there
have them.
"""

import asyncio
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import msgspec
import pytest

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    Item,
    OpenaiConfig,
    ScoredDataGroup,
    ScoredDataItem,
    ServerBaseline,
)
from atroposlib.envs.commands.evaluation_report import evaluate_once
from atroposlib.envs.files.html_report import write_html
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tests.unit.envs.fakes import Trainer, running_api

pytestmark = pytest.mark.timeout(60)


class OldStyleConfig(BaseEnvConfig):
    run_evaluation: bool = True


class OldStyleEnv(BaseEnv):
    name = "oldstyle"
    env_config_cls = OldStyleConfig

    def __init__(
        self, config: OldStyleConfig, server_configs: List[APIServerConfig], slurm: bool = True, testing: bool = False
    ):
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer: list = []
        self.eval_metrics: list = []
        self.logged: list = []
        self.cleaned = 0

    @classmethod
    def config_init(cls) -> Tuple[OldStyleConfig, List[APIServerConfig]]:
        config = OldStyleConfig(group_size=2, eval_handling=EvalHandlingEnum.LIMIT_TRAIN, wandb_name="old")
        return config, [
            OpenaiConfig(model_name="m", base_url="http://localhost:9001/v1", api_key="x", num_requests_for_eval=256)
        ]

    async def setup(self) -> None:
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return ({"role": "user", "content": f"item {self.iter}"},)

    async def collect_trajectories(self, item: Item) -> Tuple[Optional[ScoredDataGroup], List[Item]]:
        completions = await self.server.chat_completion(messages=list(item), n=self.config.group_size, max_tokens=8)
        to_score = [
            ((*item, {"role": "assistant", "content": c.message.content}), c.finish_reason) for c in completions.choices
        ]
        return await self.score(to_score), []

    async def score(self, rollout_group_data: List) -> Optional[ScoredDataGroup]:
        scores = ScoredDataGroup()
        scores["tokens"] = list()
        scores["masks"] = list()
        scores["scores"] = list()
        for index, (messages, finish_reason) in enumerate(rollout_group_data):
            out_dict = tokenize_for_trainer(self.tokenizer, messages, finish_reason=finish_reason)
            scores["tokens"].append(out_dict["tokens"])
            scores["masks"].append(out_dict["masks"])
            scores["scores"].append(1.0 if index else -1.0)
        for score in scores["scores"]:
            self.percent_correct_buffer.append(max(score, 0))
        return scores

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item = None) -> None:
        num_keep = self.config.num_rollouts_per_group_for_logging
        if num_keep == -1:
            num_keep = self.config.group_size
        self.rollouts_for_wandb.append(
            [(self.tokenizer.decode(scored_data["tokens"][i]), scored_data["scores"][i]) for i in range(num_keep)]
        )
        if len(self.rollouts_for_wandb) > self.config.num_rollouts_to_keep:
            self.rollouts_for_wandb.pop(0)

    async def wandb_log(self, wandb_metrics: Optional[Dict] = None) -> None:
        if wandb_metrics is None:
            wandb_metrics = {}
        if self.percent_correct_buffer:
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(self.percent_correct_buffer)
        self.percent_correct_buffer = list()
        for item in self.eval_metrics:
            wandb_metrics[item[0]] = item[1]
        self.eval_metrics = list()
        self.logged.append(wandb_metrics)
        await super().wandb_log(wandb_metrics)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.eval_metrics.append(("eval/percent_correct", 0.5))

    async def cleanup(self) -> None:
        self.cleaned += 1

    async def close(self) -> None:
        await super().close()  # nobody calls it, as in the ancestor


class OneSampleEnv(OldStyleEnv):
    name = "onesample"

    collect_trajectories = BaseEnv.collect_trajectories  # type: ignore[assignment]

    async def collect_trajectory(self, item: Item) -> Tuple[Optional[ScoredDataItem], List[Item]]:
        await self.server.completion(prompt="x", max_tokens=4)
        out = tokenize_for_trainer(
            self.tokenizer, [*item, {"role": "assistant", "content": "yes"}], include_messages=True
        )
        return (
            ScoredDataItem(
                tokens=out["tokens"], masks=out["masks"], scores=float(len(self.workers)), messages=out["messages"]
            ),
            [],
        )


@pytest.mark.parametrize("env_class", [OldStyleEnv, OneSampleEnv])
async def test_environment_of_the_ancestor_runs_unchanged(tmp_path: Path, env_class: type[OldStyleEnv]) -> None:
    async with running_api() as api, FakeInferenceServer() as server:
        config, servers = env_class.config_init()
        config.tokenizer_name = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
        config.rollout_server_url = api.url
        config.ensure_scores_are_not_same = False
        servers[0].base_url = server.base_url
        env = env_class(config, servers, slurm=False, testing=False)
        serving = asyncio.create_task(env.env_manager())
        trainer = Trainer(api.url, batch_size=4, num_steps=2)
        await trainer.register()
        await trainer.train(2)
        await asyncio.wait_for(serving, 20)
    item = trainer.batches[0][0]
    assert len(item["tokens"]) == 2
    assert item["inference_logprobs"] is None
    assert item["messages"] is None
    assert env.cleaned >= 4
    assert env.rollouts_for_wandb
    if env_class is OldStyleEnv:
        assert any("train/percent_correct" in metrics for metrics in env.logged)
    assert any("eval/percent_correct" in metrics for metrics in env.logged)


class FileEnv(OldStyleEnv):
    """Samples nothing: when the trainer has moved on it sends by itself, in the manner of the ancestor's loader of SFT
    data.
    """

    name = "file"

    async def add_train_workers(self) -> None:
        pass

    async def env_step_checks(self) -> None:
        step = self.status_dict["current_step"]
        if self.curr_step != step or not self.items_sent_this_step:
            for _ in range(2):
                await self.handle_send_to_api(
                    {"tokens": [[1, step]] * 2, "masks": [[1, step]] * 2, "scores": [1.0, 0.0]}
                )
        await super().env_step_checks()


async def test_environment_that_sends_at_steps_and_starts_no_workers_runs_unchanged(tmp_path: Path) -> None:
    async with running_api() as api, FakeInferenceServer() as server:
        config, servers = FileEnv.config_init()
        config.tokenizer_name = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
        config.rollout_server_url = api.url
        servers[0].base_url = server.base_url
        env = FileEnv(config, servers)
        trainer = Trainer(api.url, batch_size=4, num_steps=3)
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await trainer.joined()
        trainer.step = 1  # moved on without a batch of this environment
        await trainer.report()
        await asyncio.wait_for(trainer.train(2), 30)
        await asyncio.wait_for(serving, 20)
    assert [batch[0]["tokens"][0][1] for batch in trainer.batches] == [0, 1]
    assert not server.hits["/v1/chat/completions"]


def test_baseline_configuration_is_accepted(tmp_path: Path) -> None:
    config = OldStyleConfig(tokenizer_name=str(save_tiny_tokenizer(tmp_path / "tokenizer")))
    env = OldStyleEnv(config, ServerBaseline(model_name="m"), slurm=False)  # type: ignore[arg-type]
    assert [server.config.base_url for server in env.server.servers] == [
        f"http://localhost:{port}/v1" for port in range(9004, 9008)
    ]
    assert env.max_num_workers == 32


SAID = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("sample", "shown"),
    [
        ({"messages": SAID, "question": "2 + 2", "gold_answer": "4", "score": 1, "correct": True}, "✓ score 1"),
        ({"messages": SAID, "question": {"text": "2 + 2"}, "sample": 1, "score": 0.5}, "◐ score 0.5"),
        ({"problem": "2 + 2", "score": 1.0}, "✓ score 1"),
        ({"messages": SAID, "is_correct": True}, "? no score: not scored"),
        ("4", "? no score: not scored"),
        ({"messages": ["2 + 2", "4"], "score": 1.0}, None),
    ],
)
async def test_every_sample_of_the_ancestors_evaluate_log_is_on_the_page(
    tmp_path: Path, sample: Any, shown: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Evaluated(OldStyleEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await self.evaluate_log({"eval/percent_correct": 0.5}, samples=[sample, sample])

    config, servers = Evaluated.config_init()
    config.tokenizer_name = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    config.data_dir_to_save_evals = str(tmp_path / "results")
    env = Evaluated(config, servers, slurm=False, testing=False)
    async with env._env_run as run:
        await evaluate_once(env, run)
    rows = (tmp_path / "results/samples.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(row) for row in rows] == [sample, sample]
    assert ("No page: " in caplog.text) == (shown is None)
    if shown is not None:
        assert (tmp_path / "results/samples.html").read_text().count(shown) == 2
    write = tmp_path / "author.html"
    if "score" in sample and shown is not None:
        write_html(tmp_path / "results/samples.jsonl", write)
        assert write.read_text().count(shown) == 2
