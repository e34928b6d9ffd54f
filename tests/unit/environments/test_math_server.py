import json
from pathlib import Path
from random import Random

import pytest

from atroposlib.child_processes.math_child import judge
from atroposlib.envs.data.problems import Problem
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.math_server import MathEnv, is_worked_out, make_problem
from tests.unit.environments.support import running_env

pytestmark = pytest.mark.timeout(240)


def test_known_results_of_generated_problems_are_understood_by_the_grader() -> None:
    for number in range(40):
        result = make_problem(Random(number)).result
        assert judge(result, result) == {"verdict": "right"}, result
        assert is_worked_out(result, result), result


NUMBER, ROOT, POLYNOMIAL = r"\frac{23}{20}", r"11\sqrt{2}", "8x^2 + 22x + 15"


@pytest.mark.parametrize(
    ("result", "answers"),
    [
        (NUMBER, [r"\dfrac{23}{20}", "23/20", "1.15", "1,15", r"\frac{46}{40}", r"1\frac{3}{20}", "1 3/20", r"115\%"]),
        (NUMBER, [r"x = \frac{23}{20}", r"x \approx 1.15", r"x \in \{1.15\}", "(23/20)", r"{23 \over 20}"]),
        (NUMBER, [r"\frac34 + \frac25 = \frac{23}{20}", r"\frac{23}{20} \approx 1.2", "Answer: 23/20."]),
        (
            r"-\frac{3}{4}",
            [r"\frac{-3}{4}", r"\frac{3}{-4}", r"-\left(\frac{3}{4}\right)", "(-3)/4", "x = - 3/4", "−0.75"],
        ),
        (r"\frac{1}{3}", [r"0.\overline{3}", r"0.333\ldots"]),
        ("3", ["3", "+3", "3.0", "x = 3", "(3)", r"\text{3}", r"x = \mathbf{3}", "6/2"]),
        (POLYNOMIAL, ["8x²+22x+15", r"15 + 22 \cdot x + 8 \times x^{2}", "8*x^2+22*x+15", "8.0x^2 + 22x + 15"]),
        (POLYNOMIAL, ["(2x+3)(4x+5) = 8x^2+22x+15", "y = 8x^2+22x+15", "(8x^2+22x+15)", "8x^2+10x+12x+15"]),
        (
            ROOT,
            [r"11 \sqrt 2", "11√2", "11*sqrt(2)", r"11 \cdot \sqrt{2}", r"\sqrt2\cdot11", r"\sqrt{242}", "15.5563492"],
        ),
        (ROOT, [r"\sqrt{72} + 5\sqrt{2} = 11\sqrt{2}", r"11\sqrt{2} \approx 15.56"]),
        (r"11\sqrt{4}", ["22"]),
    ],
)
def test_every_spelling_of_a_result_is_worked_out(result: str, answers: list[str]) -> None:
    assert [answer for answer in answers if not is_worked_out(answer, result)] == []


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
