import json
from pathlib import Path
from random import Random

import pytest

from atroposlib.child_processes.math_child import judge
from atroposlib.envs.data.problems import Problem
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.math_server import MathEnv, make_problem
from tests.unit.environments.support import running_env

pytestmark = pytest.mark.timeout(240)


def test_known_results_of_generated_problems_are_understood_by_the_grader() -> None:
    for number in range(40):
        result = make_problem(Random(number)).result
        assert judge(result, result) == {"verdict": "right"}, result


@pytest.mark.services
async def test_answers_are_compared_as_mathematics(tmp_path: Path) -> None:
    answers = [r"\boxed{\frac{1}{2}}", r"So \boxed{0.5}.", r"\boxed{\frac{2}{3}}", "1/2"]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(MathEnv, tmp_path, server, grader_timeout=60) as env,
    ):
        group, _ = await env.collect_trajectories(Problem("Compute.", r"It is $\boxed{\frac{1}{2}}$."))
        assert not env._env_run.counts
    assert group is not None
    assert group["scores"] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.services
async def test_group_on_which_the_grader_failed_is_dropped(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: r"\boxed{x+1}") as server,
        running_env(MathEnv, tmp_path, server) as env,
    ):
        await env.handle_env(Problem("?", r"\boxed{???}"))
    assert env._env_run.counts == {"groups_unscored": 1, "items_without_group": 1, "rollouts_failed_scorer": 4}


async def test_file_with_other_field_names_is_read_and_every_epoch_has_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"problem": f"p{n}", "solution": rf"Thus \boxed{{{n}}}."}) + "\n" for n in range(10))
    )
    fields = {"dataset_path": str(path), "question_field": "problem", "answer_field": "solution"}
    async with FakeInferenceServer() as server, running_env(MathEnv, tmp_path, server, **fields) as env:
        epochs = [[await env.get_next_item() for _ in range(6)] for _ in range(2)]
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    assert {problem.result for problem in [*epochs[0], *env.held_out]} == {str(n) for n in range(10)}
