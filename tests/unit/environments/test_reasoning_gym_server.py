from collections import Counter
from pathlib import Path

import pytest

from atroposlib.envs.errors import DataError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.reasoning_gym_server import ReasoningGymEnv, weights_by_name
from tests.unit.environments.support import running_env

pytestmark = pytest.mark.timeout(240)


def test_weights_are_read_by_name() -> None:
    assert weights_by_name("all") == {}
    assert weights_by_name("chain_sum=3, leg_counting") == {"chain_sum": 3.0, "leg_counting": 1.0}
    for wrong in ("chain_sum=0", "=1", "chain_sum=-1", "chain_sum=many"):
        with pytest.raises(ValueError):
            weights_by_name(wrong)


async def test_tasks_are_mixed_by_weight_configured_and_scored_by_their_own_rule(tmp_path: Path) -> None:
    options = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    fields = {"tasks": "chain_sum=3,leg_counting", "task_options": options, "scorer_processes": 2, "scorer_timeout": 60}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        items = [await env.get_next_item() for _ in range(200)]
        shares = Counter(item.name for item in items)
        assert 100 < shares["chain_sum"] < 190 and shares.total() == 200
        item = next(item for item in items if item.name == "chain_sum")
        expression = item.question.partition(":")[2].replace("=", "").strip()
        left, operator, right = expression.split()
        total = int(left) + int(right) if operator == "+" else int(left) - int(right)
        server.answer = lambda prompt: [f"<answer>{total}</answer>", f"<answer>{total + 100}</answer>", str(total), "<answer></answer>"]
        group, _ = await env.collect_trajectories(item)
        assert group is not None and group["scores"] == [1.0, 0.0, 0.0, 0.0]


async def test_unknown_task_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        with pytest.raises(DataError, match="no task 'chain_sums'; did you mean 'chain_sum'"):
            async with running_env(ReasoningGymEnv, tmp_path, server, tasks="chain_sums"):
                pass


async def test_every_task_can_be_asked_by_name(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, heldout_size=1, scorer_timeout=60) as env:
        assert len(env.weights) > 100
        for name in env.weights:
            assert (await env.pool.ask(env._entry(name, 3)))["question"]
