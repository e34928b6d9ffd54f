"""The model can neither stop nor fool a shipped environment."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings

from atroposlib.compat.message_history_utils import strip_thinking
from atroposlib.envs.data.problems import Problem
from atroposlib.envs.errors import Unscored
from atroposlib.envs.question_env import QuestionEnv
from atroposlib.envs.server_handling.tool_call_translator import PARSERS, ToolCallTranslator
from atroposlib.grading import Grader, GraderSettings, Outcome, extract_boxed, extract_tagged, last_number
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.calculator_tool_server import CalculatorConfig, CalculatorEnv, tool_result
from environments.calculator_tool_server import Question as Sum
from environments.countdown_server import CountdownConfig, CountdownEnv, Puzzle
from environments.letter_counting_server import LetterCountingEnv
from environments.letter_counting_server import Question as Word
from environments.math_server import MathEnv
from environments.template_server import LargerNumberEnv
from tests.unit.environments.support import running_env
from tests.unit.hostile_answers.hostile import assert_linear, hostile_answers, long_answers

Score = Callable[[str], float]


def scorer(env_class: type[QuestionEnv], item: Any, config: Any = None) -> Score:
    """`score` of an environment that needs neither servers nor child processes."""
    env = env_class.__new__(env_class)
    env.config = config

    def score(answer: str) -> float:
        scoring: Any = env.score(item, answer)
        try:
            scoring.send(None)  # it waits for nothing, so one step is all of it
        except StopIteration as ended:
            return float(ended.value)
        raise AssertionError("the score waits for something")

    return score


count_letters = scorer(LetterCountingEnv, Word("strawberry", "r"))
calculate = scorer(CalculatorEnv, Sum("2 + 1", Fraction(3)), CalculatorConfig(tool_cost=0.4))
count_down = scorer(CountdownEnv, Puzzle((1, 2, 3, 4), 9), CountdownConfig(format_score=0.1))
larger = scorer(LargerNumberEnv, [3, 2])
SCORES = [count_letters, calculate, count_down, larger]


def tagged(answer: str) -> str:
    """Another reading of the last <answer> tags than the project's."""
    pieces = [piece.rpartition("<answer>") for piece in answer.split("</answer>")[:-1]]
    return next((content.strip() for _, opened, content in reversed(pieces) if opened), "")


def is_three(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None and Decimal(text) == 3


def value_of_equation(text: str) -> Fraction | None:
    """Another reading of an expression than the project's: Python's, of numbers and operators alone."""
    for sign, plain in (("×", "*"), ("÷", "/"), ("−", "-"), ("·", "*"), ("[", "("), ("]", ")")):
        text = text.replace(sign, plain)
    if not re.fullmatch(r"[0-9+*/(). -]{1,500}", text) or "**" in text or "//" in text:
        return None
    numbers = re.findall(r"[0-9]+(?:\.[0-9]+)?", text)
    if Counter(map(Fraction, numbers)) - Counter(map(Fraction, (1, 2, 3, 4))):
        return None
    try:
        computed: Fraction = eval(re.sub(r"[0-9]+(?:\.[0-9]+)?", r"Fraction('\g<0>')", text), {"Fraction": Fraction})
        return computed
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None


@settings(max_examples=1500)
@given(hostile_answers)
@example("<answer>000000003999</answer>")
@example(f"<answer>{'0' * 5000}3</answer>")
@example("<answer>٣</answer>")
@example("<answer>2 + 1</answer>")
@example("<answer>3</answer><answer>4</answer>")
@example("<answer>3</answer> so </answer>")
@example("<answer>3 4 5</answer>")
@example("3e0 1/3")
def test_a_reward_above_0_is_for_an_answer_that_is_right(answer: str) -> None:
    assert count_letters(answer) in (0.0, 1.0)
    assert not count_letters(answer) or is_three(tagged(answer))
    assert 0.0 <= calculate(answer) <= 1.0
    assert not calculate(answer) or is_three(tagged(answer))
    assert larger(answer) in (0.0, 1.0)
    assert not larger(answer) or re.findall(r"[0-9]+", answer)[-1] == "3"
    assert count_down(answer) in (0.0, 0.1, 1.0)
    if count_down(answer) == 1.0:
        assert value_of_equation(tagged(answer).partition("=")[0].strip()) == 9


@pytest.mark.parametrize(
    ("score", "answer", "reward"),
    [
        (count_letters, "<answer>3</answer>", 1.0),
        (count_letters, "<answer>03</answer>", 1.0),
        (count_letters, "<answer>3</answer> so </answer>", 1.0),
        (count_letters, "<answer>000000003999</answer>", 0.0),
        (count_letters, "<answer>３</answer>", 0.0),
        (calculate, "<answer>3</answer>", 1.0),
        (calculate, "<answer>3.0</answer>", 1.0),
        (calculate, "<answer>2 + 1</answer>", 0.0),
        (calculate, "<tool_call>" * 9 + "<answer>3</answer>", 0.0),
        (count_down, "<answer>(4 - 1) * 3</answer>", 1.0),
        (count_down, "<answer>(٤ - 1) * 3</answer>", 0.0),
        (larger, "3", 1.0),
        (larger, "2e3", 0.0),
        (larger, "2^3", 0.0),
        (larger, "1/3", 0.0),
        (larger, "−3", 0.0),
        (larger, "-$3", 0.0),
        (larger, "3³", 0.0),
    ],
)
def test_right_answers_are_rewarded_and_those_that_only_look_alike_are_not(
    score: Score, answer: str, reward: float
) -> None:
    assert score(answer) == reward


@pytest.mark.parametrize("score", SCORES, ids=["letters", "calculator", "countdown", "template"])
def test_scores_take_linear_time(score: Score) -> None:
    for text in long_answers():
        assert_linear(score, text)


def test_extraction_and_the_calculator_take_linear_time() -> None:
    for text in long_answers():
        for read in (extract_boxed, extract_tagged, last_number, tool_result):
            assert_linear(read, text)


@settings(max_examples=500)
@given(hostile_answers)
@example('<tool_call>{"name": "calculator", "arguments": {"expression": "1' + "0" * 320 + '/3"}}</tool_call>')
@example("<tool_call>" + "[" * 100_000 + "</tool_call>")
@example("<tool_call>{{}: 1}</tool_call>")
def test_the_calculator_replies_to_whatever_is_asked(text: str) -> None:
    for call in (text, f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{text}"}}}}</tool_call>'):
        reply = tool_result(call)
        assert reply is None or isinstance(reply, str)


@pytest.mark.rotating
@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_hostile_tool_calls_are_parsed_or_left_as_text_in_linear_time(parser: str) -> None:
    @settings(max_examples=200)
    @given(hostile_answers)
    @example("[" * 100_000)
    @example('{"name": "a", "arguments": ' + "9" * 5000 + "}")
    @example('{"name": "\\ud800", "arguments": {"x": "\\u0000"}}')
    def check(text: str) -> None:
        for call in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}"):
            content, calls, _ = ToolCallTranslator(None, parser).parse_model_output(call, tools=[{}])
            assert content is None or isinstance(content, str)
            assert calls is None or all(isinstance(each.function.arguments, str) for each in calls)

    check()
    for text in long_answers():
        assert_linear(PARSERS[parser], text)
        assert_linear(PARSERS[parser], f"[TOOL_CALLS]{text}")


@pytest.mark.parametrize("depth", range(940, 1000, 5))
def test_a_tool_call_nested_as_deep_as_can_be_read_raises_nothing(depth: int) -> None:
    text = f'<tool_call>{{"name": "a", "arguments": {"[" * depth}{"]" * depth}}}</tool_call>'
    ToolCallTranslator(None).parse_model_output(text, tools=[{}])


@settings(max_examples=300)
@given(hostile_answers)
def test_thoughts_are_stripped_from_whatever_is_written(text: str) -> None:
    assert len(strip_thinking(text)) <= len(text)


def test_thoughts_are_stripped_in_linear_time() -> None:
    for text in long_answers():
        assert_linear(strip_thinking, text)


def test_no_wrong_answer_counts_as_right_in_the_accuracy_whatever_a_call_costs(tmp_path: Any) -> None:
    async def right_from() -> float:
        async with (
            FakeInferenceServer() as server,
            running_env(CalculatorEnv, tmp_path, server, tool_cost=0.5) as env,
        ):
            return env.right_from

    assert asyncio.run(right_from()) > 0.0


@pytest.mark.services
async def test_calls_are_paid_for_though_a_later_turn_thinks(tmp_path: Any) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 1"}}</tool_call>'

    def model(prompt: str) -> str:
        return f"hm</think>{call}" if prompt.count("<|im_start|>assistant") == 1 else "so</think><answer>3</answer>"

    fields = {"tool_cost": 0.1, "thinking_mode": True, "max_new_tokens": 200}
    async with FakeInferenceServer(model) as server, running_env(CalculatorEnv, tmp_path, server, **fields) as env:
        group, _ = await env.collect_trajectories(Sum("2 + 1", Fraction(3)))
    assert group is not None
    assert group["scores"] == pytest.approx([0.9] * 4)


# --- mathematics ----------------------------------------------------------------------------------------------------

# Each restated answer equals its result, and leaves the work to the grader.
RESTATED = {
    r"\frac{23}{20}": [
        *(r"\frac34+\frac25", r"\frac{3}{4}+\frac{2}{5}", "3/4+2/5", "0.75 + 0.4", r"\frac{15}{20} + \frac{8}{20}"),
        *(r"\frac{15+8}{20}", "(15+8)/20", r"\frac{3 \cdot 5 + 2 \cdot 4}{20}", r"\frac{\frac34+\frac25}{1}"),
        *(r"\frac34+\frac25 \approx 1.14", r"\frac{23}{20} = \frac34+\frac25", r"x = \frac34+\frac25"),
    ],
    "3": [r"\frac{9-3}{2}", "(9-3)/2", "9/2 - 3/2", r"\sqrt{9}", r"\frac{6}{2}\frac{2}{2}"],
    "8x^2 + 22x + 15": [
        *("(2x+3)(4x+5)", "(2x + 3) (4x + 5)", r"(2x+3)\cdot(4x+5)", r"\left(2x+3\right)\left(4x+5\right)"),
        *("2x(4x+5)+3(4x+5)", "{2x+3}{4x+5}", "8(x+1.5)(x+1.25)", r"\frac{2x+3}{\frac{1}{4x+5}}"),
        *(r"2x \cdot 4x + 2x \cdot 5 + 3 \cdot 4x + 3 \cdot 5", "8x^2+22x+15 = (2x+3)(4x+5)"),
    ],
    r"11\sqrt{2}": [
        *(
            r"\sqrt{72} + 5\sqrt{2}",
            r"6\sqrt{2}+5\sqrt{2}",
            r"(6+5)\sqrt{2}",
            r"\sqrt{2}(6+5)",
            r"\sqrt{(6+5)^2 \cdot 2}",
        ),
        *(r"\sqrt{72}+\sqrt{50}", r"72^{1/2} + 5\sqrt{2}", r"\sqrt{2}(\sqrt{36}+5)", r"11\sqrt2 = \sqrt{72}+5\sqrt2"),
    ],
}


@pytest.mark.services
async def test_a_generated_problem_is_not_solved_by_restating_it(tmp_path: Any) -> None:
    async with FakeInferenceServer() as server, running_env(MathEnv, tmp_path, server, grader_timeout=60) as env:
        for result, answers in RESTATED.items():
            problem = Problem("?", result)
            assert await env.score(problem, rf"So \boxed{{{result}}}.") == 1.0
            paid = [answer for answer in answers if await env.score(problem, rf"\boxed{{{answer}}}")]
            assert paid == []


@pytest.mark.services
async def test_a_file_of_problems_may_ask_for_any_form(tmp_path: Any) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f'{{"question": "Factor {n}.", "answer": "(x+{n})(x+2)"}}\n' for n in range(9)))
    fields = {"dataset_path": str(path), "grader_timeout": 60}
    async with FakeInferenceServer() as server, running_env(MathEnv, tmp_path, server, **fields) as env:
        assert await env.score(Problem("Factor.", "(x+1)(x+2)"), r"\boxed{(x+1)(x+2)}") == 1.0


HEDGES = [
    *(
        "{a} or {b}",
        "{a}, {b}",
        "{a}; {b}",
        r"{a} \text{{ or }} {b}",
        r"{a} \lor {b}",
        r"{a} \vee {b}",
        "{a} {b}",
        r"{a} \\ {b}",
        "{a} = {b}",
    ),
    *(
        r"{a} \approx {b}",
        "{a} ≈ {b}",
        r"x={a} \lor x={b}",
        r"x={a} \text{{ or }} x={b}",
        "x={a} x={b}",
        "x={a}=x={b}",
        "{a} y={b}",
    ),
    *(
        r"{a} \text{{ not }} {b}",
        r"{a} \cup {b}",
        r"\{{ {a}, {b} \}}",
        "[{a}, {b}]",
        r"{a} \to {b}",
        r"{a} \iff {b}",
        r"{a} \mid {b}",
    ),
    *(r"x={a} \lor y={b}", "{a}}} \\boxed{{{b}", r"{a} \boxed{{{b}}}", "{a} & {b}", "{a} | {b}"),
    *(r"{a} \text{{ m or }} {b} \text{{ m}}", r"{a} \text{{ km}}, {b} \text{{ km}}"),
    *(r"{a} \mathrm{{ cm}}^2 {b} \mathrm{{ cm}}^2", r"\fbox{{{a}}} {b}"),
]


@pytest.mark.services
async def test_an_answer_that_names_two_results_is_right_for_neither() -> None:
    grader = Grader(GraderSettings(time_limit_s=20))
    try:
        for first, second in (("17", "18"), (r"\frac{1}{2}", r"\frac{1}{3}"), ("x=2", "x=5")):
            for hedge in HEDGES:
                answer = hedge.format(a=first, b=second)
                for gold in (first, second):
                    assert await grader.grade(answer, gold) is not Outcome.RIGHT, (answer, gold)
    finally:
        await grader.close()


@pytest.mark.services
@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("2 \\cdot 9 = 18", "18"),
        ("x = 18", "18"),
        ("a + b = 18", "18"),
        (r"\frac{100}{7} \approx 14.29", r"\frac{100}{7}"),
        ("(x+1)^2 = x^2 + 2x + 1", "x^2 + 2x + 1"),
        (r"18 \text{ dollars}", "18"),
        (r"18 \text{ cm}^2", "18"),
        ("f(x) = x^2", "x^2"),
        ("1, 2", r"\{1, 2\}"),
        ("x=2, x=3", "x=2, x=3"),
    ],
)
async def test_one_result_with_its_derivation_is_right(answer: str, gold: str) -> None:
    grader = Grader(GraderSettings(time_limit_s=20))
    try:
        assert await grader.grade(answer, gold) is Outcome.RIGHT
    finally:
        await grader.close()


@pytest.mark.services
@settings(max_examples=60)
@given(hostile_answers)
def test_grading_never_raises_and_integers_are_what_they_are(answer: str) -> None:
    async def outcomes() -> list[Outcome]:
        grader = Grader(GraderSettings(time_limit_s=3))
        try:
            read = (extract_boxed(answer), last_number(answer))
            return [
                await grader.grade(each, "3")
                for each in read
                if each is None or re.fullmatch(r"-?\d*", each) or len(each) > 1000
            ]
        finally:
            await grader.close()

    if Outcome.RIGHT in asyncio.run(outcomes()):
        assert re.search(r"(?<![0-9])0*3(?![0-9])", answer)


@pytest.mark.services
async def test_answers_that_occupy_the_grader_until_its_limit_end_nothing_and_are_named(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.envs.run.drop_log.WARNED_AFTER", 2)
    async with (
        FakeInferenceServer(lambda prompt: r"\boxed{9^{9^{9^{9^9}}}}") as server,
        running_env(MathEnv, tmp_path, server, grader_timeout=0.1, group_size=1, heldout_size=1) as env,
    ):
        item = await env.get_next_item()
        for _ in range(2):
            await env.handle_env(item)
        assert env._env_run.counts["groups_unscored"] == 2
        assert env._env_run.counts["groups_accepted"] == 0
    assert "groups in a row could not be scored and nothing was sent" in caplog.text
    assert "9^{9^{9^{9^9}}}" in caplog.text


async def test_a_score_that_is_unscored_drops_the_group_and_is_no_fault_of_the_author(tmp_path: Any) -> None:
    class Unsure(LargerNumberEnv):
        async def score(self, item: Any, answer: str) -> float:
            raise Unscored("no verdict")

    async with FakeInferenceServer() as server, running_env(Unsure, tmp_path, server) as env:
        await env.handle_env([1, 2])
    assert env._env_run.counts["groups_unscored"] == 1


def test_the_grader_of_gsm8k_and_math_refuses_long_answers_in_linear_time() -> None:
    grader = Grader()
    for text in long_answers():
        assert_linear(lambda answer: asyncio.run(grader.grade(answer, "3")), text)
