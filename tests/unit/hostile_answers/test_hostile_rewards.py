"""The model can neither stop nor fool a reward function."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings

from atroposlib.compat.reward_fns import RewardFunction, registry
from atroposlib.compat.reward_fns.registry import BUILT_IN
from atroposlib.envs.errors import Unscored
from atroposlib.grading import GraderSettings
from atroposlib.grading.grader import BlockingGrader
from tests.unit.hostile_answers.hostile import assert_linear, hostile_answers, long_answers

GRADER = BlockingGrader(GraderSettings(time_limit_s=2))
# As each class's docstring has it, with the default settings.
RANGES = {
    "accuracy": (0.0, 1.0),
    "accuracyx": (0.0, 1.0),
    "cascadingr1math": (0.0, 1.5),
    "chandasmeter": (0.0, 1.0),
    "combined": (0.0, 1.0),
    "cosinescaled": (-1.0, 1.0),
    "crosswordformat": (0.0, 1.0),
    "format": (0.0, 1.0),
    "formatreasoning": (0.0, 0.5),
    "length": (0.0, 1.0),
    "r1": (0.0, 1.5),
    "reasoningsteps": (0.0, 1.0),
    "repetitionpenalty": (-1.0, 0.0),
    "thinkformat": (0.0, 1.0),
}


def made(name: str) -> RewardFunction:
    reward = registry.create(name, **({"rewards": ["length"]} if name == "combined" else {}))
    for each in (reward, getattr(reward, "_accuracy", None)):
        if each is not None and hasattr(each, "_grader"):
            each._grader = GRADER
    return reward


REWARDS = {name: made(name) for name in BUILT_IN}


def scored(name: str, answer: str, gold: str = "3") -> float:
    try:
        return REWARDS[name]([answer], solution=gold)[0]
    except Unscored:  # math-verify was killed at its time limit: no reward at all
        return REWARDS[name]([""], solution=gold)[0]


def test_every_built_in_reward_has_a_documented_range() -> None:
    assert RANGES.keys() == BUILT_IN.keys()


@pytest.mark.rotating
@pytest.mark.parametrize("name", sorted(RANGES.keys() - {"accuracy", "accuracyx", "cascadingr1math", "r1"}))
def test_rewards_of_form_stay_in_their_range(name: str) -> None:
    low, high = RANGES[name]

    @settings(max_examples=300)
    @given(hostile_answers)
    @example("à")
    @example("1. ﬁ")
    def check(answer: str) -> None:
        assert low <= scored(name, answer) <= high

    check()


@pytest.mark.services
@pytest.mark.parametrize("name", ["accuracy", "accuracyx", "cascadingr1math", "r1"])
def test_correctness_is_rewarded_for_one_solution_only(name: str) -> None:
    low, high = RANGES[name]

    @settings(max_examples=150)
    @given(hostile_answers)
    @example("3 4")
    @example("1 or 2 or 3 or 4")
    @example("9" * 5000)
    @example("\\boxed{" + "9" * 5000 + "}")
    @example(r"\boxed{9^{9^{9^9}}}")
    @example("\\boxed{1" + "0" * 400 + "/3}")
    def check(answer: str) -> None:
        three, four = scored(name, answer, "3"), scored(name, answer, "4")
        assert low <= three <= high
        assert low <= four <= high
        form = (
            REWARDS["formatreasoning"]([answer])[0] * (2 if name == "r1" else 1)
            if name == "r1" or "math" in name
            else 0.0
        )
        form = 0.5 if form else 0.0
        assert three <= form or four <= form
        if three > form:
            assert any(char.isnumeric() for char in answer)

    check()


@pytest.mark.services
@pytest.mark.parametrize(
    ("name", "answer", "gold", "reward"),
    [
        ("accuracy", r"\boxed{2}", r"\frac{1}{2}", 0.0),
        ("accuracy", r"\boxed{2}", "1/2", 0.0),
        ("accuracy", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("accuracy", r"\boxed{1000001}", "1000000", 0.0),
        ("accuracy", r"\boxed{1,2}", "12", 0.0),
        ("accuracy", r"\boxed{1,234}", "1234", 1.0),
        ("accuracy", r"\boxed{$5}", "5", 1.0),
        ("accuracy", r"\boxed{5$3}", "53", 0.0),
        ("accuracy", r"\boxed{٣}", "3", 1.0),
        ("accuracy", r"#### 17} \boxed{3", "3", 0.0),
        ("accuracyx", "3 4 5 6", "4", 0.0),
        ("accuracyx", "A, B, C or D", "B", 0.0),
        ("accuracyx", "It is Paris.", "Paris", 1.0),
        ("accuracyx", "The answer becomes **Paris**.", "Paris", 1.0),
        ("accuracyx", "London or Paris", "Paris", 0.0),
        ("accuracyx", "The answer is not Paris", "Paris", 0.0),
        ("accuracyx", 'London, or "Paris"', "Paris", 0.0),
        ("accuracyx", "either London or (Paris)", "Paris", 0.0),
        ("accuracyx", "It is not *Paris*.", "Paris", 0.0),
        ("accuracyx", 'The answer: "**Paris**"', "Paris", 1.0),
        ("accuracyx", "London, Paris or Rome", "Paris", 0.0),
        ("accuracyx", "It is 4 of course", "4", 1.0),
        ("accuracyx", "It is 3x+1", "x+1", 0.0),
        ("crosswordformat", "1. ﬁ", "", 0.0),
        ("crosswordformat", "1-Across: Ocean", "", 1.0),
        ("crosswordformat", "DOWN 3: tree\n2. R2D2", "", 0.0),
        ("format", "<think></think> </think>", "", 0.0),
    ],
)
def test_answers_are_read_as_they_stand(name: str, answer: str, gold: str, reward: float) -> None:
    assert REWARDS[name]([answer], solution=gold) == [reward]


@pytest.mark.rotating
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_rewards_take_linear_time(name: str) -> None:
    for text in long_answers():
        assert_linear(lambda answer: scored(name, answer), text)


def test_answers_that_nobody_can_work_out_are_wrong_without_waiting() -> None:
    class NeverAsked:
        def grade(self, answer: Any, gold: str) -> None:
            raise AssertionError(f"asked about {answer}")

    reward = registry.create("accuracy")
    reward._grader = NeverAsked()  # type: ignore[attr-defined]
    answers = [r"9^{9^{9^9}}", r"2^{99999}", r"(9!)!", r"99999!", r"9^{9!}", r"\binom{99999}{5}"]
    assert reward([f"\\boxed{{{answer}}}" for answer in answers], solution="3") == [0.0] * len(answers)


def test_a_killed_grader_is_no_reward_and_no_fault_of_the_author() -> None:
    class Killed:
        def grade(self, answer: Any, gold: str) -> str:
            return "grader_failed"

    reward = registry.create("accuracy")
    reward._grader = Killed()  # type: ignore[attr-defined]
    with pytest.raises(Unscored, match="math-verify failed"):
        reward([r"\boxed{x+1}"], solution="x")


def test_fraction_of_many_digits_is_compared_exactly() -> None:
    digits = "1" + "0" * 400
    assert REWARDS["accuracy"]([f"\\boxed{{{digits}/3}}"], solution=str(Fraction(10**400, 3))) == [1.0]
