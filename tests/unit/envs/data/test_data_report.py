"""The look at the data when it is loaded: what is left out, refused or only said, with counts and examples."""

import json
import logging
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.data.data_report import DataReport, question_key, write_reports
from atroposlib.envs.data.dataset import DatasetConfig, ItemSet, read_rows, split
from atroposlib.envs.data.known_answers import gradable
from atroposlib.envs.data.problems import Fields, Problem, read_problem_set, read_problems
from atroposlib.envs.data.prompt_limits import Look
from atroposlib.envs.errors import DataError
from atroposlib.envs.question_env import QuestionEnv
from atroposlib.grading import Grader, Outcome
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.gsm8k_server import GSM8kEnv
from environments.math_server import MathEnv
from tests.unit.environments.support import running_env

PLAIN = Fields("problem", "answer", marked=False)


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def sums(*numbers: int) -> list[dict[str, str]]:
    return [{"question": f"What is {number} + 1?", "answer": f"#### {number + 1}"} for number in numbers]


# --- held-out questions that are trained on ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_split_puts_every_copy_of_a_question_on_one_side(tmp_path: Path, seed: int) -> None:
    numbers = random.Random(3).choices(range(10), k=100)
    found = read_problem_set(write(tmp_path / "d.jsonl", *sums(*numbers)), None, 4, seed)
    trained, measured = ({problem.question for problem in part} for part in (found.train, found.held_out))
    assert not trained & measured
    assert len(found.held_out) == len(measured) == 4
    assert len(found.train) == sum(f"What is {number} + 1?" in trained for number in numbers)
    assert found.report is not None
    copies = sum(f"What is {number} + 1?" in measured for number in numbers) - 4
    assert found.report.findings["more copies of held-out questions"].count == copies > 4
    assert found.report.findings["repeated training questions"].count == len(found.train) - len(trained)


def test_a_split_without_copies_is_what_it_was() -> None:
    items = [Problem(f"q{number}", "1") for number in range(20)]
    shuffled = random.Random(7).sample(items, 20)
    found = split(items, 5, 7, "s")
    assert (found.held_out, found.train) == (shuffled[:5], shuffled[5:])
    assert found.report is not None
    assert not found.report.findings


def test_copies_count_once_towards_the_half_that_is_trained_on(tmp_path: Path) -> None:
    problems = read_problem_set(write(tmp_path / "d.jsonl", *sums(1, 1, 1, 2)), None, 2, 0)
    assert len(problems.held_out) == 1
    assert {problem.result for problem in problems.train}.isdisjoint(problem.result for problem in problems.held_out)


def test_a_test_file_that_is_trained_on_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", *sums(1, 2, 3, 3)), write(tmp_path / "test.jsonl", *sums(3, 9))
    with pytest.raises(DataError, match=r"2 held-out questions in the training part .*What is 3 \+ 1.*--env.overlap"):
        read_problem_set(train, test, 64, 0)
    apart = read_problem_set(train, test, 64, 0, overlap="leave_out")
    assert [problem.result for problem in apart.train] == ["2", "3"]
    assert len(read_problem_set(train, test, 64, 0, overlap="allow").train) == 4
    for copy in ("train.jsonl", "test.jsonl"):
        write(tmp_path / copy, *sums(1, 2))
    with pytest.raises(DataError, match="every training question is held out"):
        read_problem_set(tmp_path, None, 64, 0, overlap="leave_out")


@pytest.mark.parametrize(
    "other",
    [
        "what is 12 + 3.5?",
        "  What is  12 + 3.5 ? ",
        "What is 12+3.5",
        "What is 12 + 3.5?!",
        "\uff37hat is \uff11\uff12 \uff0b 3.5\uff1f",
        "What\u00a0is 12 + 3.5?",
        "What is\u200b 12 + 3.5?",
        "What is 12 \n+ 3.5?",
        '"What is 12 + 3.5?"',
        "\u201cWhat is 12 + 3.5?\u201d",
    ],
)
def test_questions_are_equal_but_for_case_blanks_punctuation_and_form(other: str) -> None:
    assert question_key(other) == question_key("What is 12 + 3.5?")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2 + 3?", "What is 2 - 3?"),
        ("What is 2 * 3?", "What is 2 + 3?"),
        ("What is 3.5?", "What is 35?"),
        ("What is 1 1/2?", "What is 11/2?"),
        ("What is 5!?", "What is 5?"),
        ("Write n! as a product.", "Write n as a product."),
        ("Sort 1, 2", "Sort 12"),
        ("What is f'(x)?", "What is f(x)?"),
        ("What is -5?", "What is 5?"),
    ],
)
def test_questions_that_mean_something_else_stay_apart(one: str, other: str) -> None:
    assert question_key(one) != question_key(other)


async def test_an_authors_dataset_is_looked_at_by_its_question(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", {"id": 1, "prompt": "Say A."}, {"id": 2, "prompt": "Say B."})
    test = write(tmp_path / "test.jsonl", {"id": 7, "prompt": "say a"})
    config = DatasetConfig(source=str(train), test_source=str(test))
    with pytest.raises(DataError, match=r"1 held-out questions in the training part.*--env.data.overlap leave_out"):
        await config.load(4, 0)
    config.overlap = "leave_out"
    assert [item["id"] for item in (await config.load(4, 0)).train] == [2]


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *((number, str(number)) for number in (16, -3, 0, 10**30)),
        *((16.0, "16"), (0.5, "0.5"), (1e-7, "0.0000001")),
        *((["16"], "16"), ([16], "16")),
    ],
)
def test_a_number_is_an_answer(tmp_path: Path, answer: Any, text: str) -> None:
    (found,) = read_problems(write(tmp_path / "d.jsonl", {"problem": "q", "answer": answer}), PLAIN)
    assert found.result == text
    if answer != ["16"]:  # a text, which GSM8K's form marks
        (found,) = read_problems(write(tmp_path / "d.jsonl", {"question": "q", "answer": answer}))
        assert found.result == text


@pytest.mark.parametrize("answer", [True, False, ["1", "2"], [], {"a": 1}, [["1"]]])
def test_other_kinds_of_answers_are_refused_by_line(tmp_path: Path, answer: Any) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl:1 has the answer .*expected text, a finite number or a list of one"):
        read_problems(write(tmp_path / "d.jsonl", {"problem": "q", "answer": answer}), PLAIN)


def test_numbers_of_a_parquet_file_are_answers(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"problem": ["a", "b"], "answer": [16, 807]}).to_parquet(str(tmp_path / "d.parquet"))
    assert [found.result for found in read_problems(tmp_path / "d.parquet", PLAIN)] == ["16", "807"]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"question": "", "answer": "#### 1"}, "with an empty question"),
        ({"question": " \n", "answer": "#### 1"}, "with an empty question"),
        ({"question": None, "answer": "#### 1"}, "with an empty question"),
        ({"question": "q", "answer": ""}, "with an empty answer"),
        ({"question": "q", "answer": None}, "with an empty answer"),
        ({"question": "q", "answer": "so it is #### "}, "with an empty answer"),
    ],
)
def test_empty_records_are_left_out_and_counted(tmp_path: Path, record: Any, kind: str) -> None:
    found = read_problem_set(write(tmp_path / "d.jsonl", *sums(1, 2, 3), record), None, 1, 0)
    assert len(found.train) + len(found.held_out) == 3
    assert found.report is not None
    assert found.report.findings[kind].line() == f"1 {kind} (left out): {tmp_path / 'd.jsonl'}:4"


def test_a_file_of_which_most_is_empty_is_refused(tmp_path: Path) -> None:
    records = [{"question": "q", "answer": ""}] * 3
    with pytest.raises(DataError, match=r"3 of the 4 records of .* cannot be used: 3 with an empty answer "):
        read_problem_set(write(tmp_path / "d.jsonl", *records, *sums(1)), None, 1, 0)


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, name: str) -> None:
    text = {"d.jsonl": '{"a": 1}\n', "d.json": '[{"a": 1}]', "d.csv": "a\n1\n"}[name]
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [str(row.values["a"]) for row in read_rows(tmp_path / name)] == ["1"]


# --- known answers ----------------------------------------------------------------------------------------------------

NONSENSE = "\\frac{1}{"


@pytest.mark.services
async def test_known_answers_that_cannot_be_graded_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [
        {"question": f"q{number}", "answer": answer}
        for number, answer in enumerate(["1", r"\sqrt{2}", NONSENSE, "3/4", NONSENSE, "7"])
    ]
    async with (
        FakeInferenceServer() as server,
        running_env(
            MathEnv, tmp_path, server, dataset_path=str(write(tmp_path / "d.jsonl", *records)), heldout_size=1
        ) as env,
    ):
        await env._env_run.set_up()
        (report,) = env._env_run.data.reports
        every = [*env.stream.items, *env.held_out]
    assert sorted(problem.result for problem in every) == sorted(["1", r"\sqrt{2}", "3/4", "7"])
    finding = report.findings["with an answer that cannot be graded"]
    assert (finding.count, len(finding.examples)) == (2, 2)
    assert NONSENSE in finding.examples[0]
    assert (report.train, report.held_out) == (len(env.stream.items), len(env.held_out))
    assert caplog.text.count("The grader failed on the answer") == 0
    assert "2 with an answer that cannot be graded (left out): " in caplog.text


@pytest.mark.services
async def test_data_without_answers_that_can_be_graded_is_refused(tmp_path: Path) -> None:
    problems = split([Problem(f"q{number}", NONSENSE) for number in range(9)], 2, 0, "the file")
    grader = Grader()
    with pytest.raises(
        DataError, match=r"9 of the 9 records of the file cannot be used: 9 with an answer that cannot be"
    ):
        await gradable(problems, grader)
    await grader.close()


@pytest.mark.services
async def test_the_look_at_answers_is_bounded_and_says_how_far_it_came() -> None:
    problems = split([Problem(f"q{number}", rf"\sqrt{{{number}}}") for number in range(100)], 2, 0, "the file")
    grader = Grader()
    assert await gradable(problems, grader, tries=20) == problems
    assert problems.report is not None
    assert problems.report.looked_at == {"known answers": "looked at 32 of 100 that are not plain numbers"}
    await grader.close()


async def test_an_answer_on_which_the_grader_fails_once_stays_and_costs_many_tries() -> None:
    class Busy(Grader):
        def __init__(self) -> None:
            super().__init__()
            self.asked = Counter[str]()

        async def grade(self, answer: str | None, gold: str) -> Outcome:
            self.asked[gold] += 1
            fails = "hangs" in gold or (gold == "is late" and self.asked[gold] == 1)
            return Outcome.GRADER_FAILED if fails else Outcome.RIGHT

    def among(hanging: int) -> ItemSet[Problem]:
        answers = ["is late", *(f"{number} hangs" for number in range(hanging)), *(f"x^{n}" for n in range(60))]
        return split([Problem(f"q{number}", answer) for number, answer in enumerate(answers)], 2, 0, "the file")

    kept = await gradable(among(1), Busy(), tries=1000)
    assert sorted(problem.result for problem in [*kept.train, *kept.held_out]) == sorted(
        ["is late", *(f"x^{n}" for n in range(60))]
    )
    assert kept.report is not None
    assert not kept.report.looked_at
    many = await gradable(among(39), Busy(), tries=1000)
    assert many.report is not None
    assert many.report.looked_at == {"known answers": "looked at 32 of 100 that are not plain numbers"}


async def test_plain_numbers_need_no_grader() -> None:
    problems = split([Problem(f"q{number}", f"{number}") for number in range(7500)], 2, 0, "the file")
    started = time.process_time()
    assert await gradable(problems, Grader()) is problems
    assert time.process_time() - started < 1


# --- prompts ----------------------------------------------------------------------------------------------------------


class LongEnv(QuestionEnv):
    """Some questions are long."""

    name = "long"

    async def setup(self) -> None:
        items = split(["short " + str(number) for number in range(6)] + ["x" * 3000, "y" * 3000], 3, 1, "the list")
        self.stream, self.held_out = items.stream(0), ["short", "z" * 3000]

    async def training_item(self, number: int) -> str:
        return self.stream[number]

    def prompt(self, item: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": item}]

    async def score(self, item: str, answer: str) -> float:
        return 1.0


async def test_how_many_prompts_are_looked_at_is_a_matter_of_their_size_alone() -> None:
    look = Look(lambda item: (len(item) > 300, len(item)), left=1000)
    assert await look.at(["x" * 400, "y", "z" * 400, "a" * 500, "b" * 500]) == {0, 2, 3}
    assert (look.looked, look.total) == (4, 5)
    assert await look.at(["c" * 400]) == set()
    assert (look.looked, look.total) == (4, 6)


class LimitedServer(FakeInferenceServer):
    """Lists the length of its context."""

    limit = 2000

    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"data": [{"id": self.model_name, "max_model_len": self.limit}]})


async def test_prompts_over_the_servers_limit_are_left_out_of_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with LimitedServer() as server, running_env(LongEnv, tmp_path, server) as env:
        before = len(env.stream.items)
        await env._env_run.set_up()
        kept = [env.stream[number] for number in range(40)]
        (report,) = env._env_run.data.reports
    long = before - len(env.stream.items)
    assert long >= 1
    assert all(item.startswith("short") for item in kept)
    assert len(env.held_out) == 2, "a held-out question stays, and is unscored with its reason"
    kind = "with a prompt over the limit of 2000 tokens (of the server)"
    assert report.findings[kind].count == long
    assert report.findings[f"held out {kind}"].count == 1
    assert report.train == len(env.stream.items)
    assert kind in caplog.text


async def test_prompts_over_the_trainers_limit_are_left_out_once_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"starts": [1]}')
    async with (
        FakeInferenceServer() as server,
        running_env(LongEnv, tmp_path, server, run_record_path=str(path)) as env,
    ):
        await env._env_run.set_up()
        assert any(len(item) > 100 for item in env.stream.items)
        env.max_token_len = 2048
        await env._env_run.take_over_limit()
        assert all(len(item) < 100 for item in env.stream.items)
    written = json.loads(path.read_text())
    assert written["starts"] == [1]
    (report,) = written["data"]["long"]
    assert (report["source"], report["train"]) == ("the list", len(env.stream.items))
    assert [found["kind"] for found in report["findings"]] == [
        "with a prompt over the limit of 2048 tokens (of the trainer)"
    ]


async def test_a_question_that_the_chat_template_refuses_is_not_looked_at(tmp_path: Path) -> None:
    async with LimitedServer() as server, running_env(LongEnv, tmp_path, server) as env:
        before = len(env.stream.items)
        env.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        await env._leave_out_long(env._env_run.data, 20, "of the server", held_out_too=True)
        assert len(env.stream.items) == before


async def test_data_of_which_every_prompt_is_too_long_is_refused(tmp_path: Path) -> None:
    tight = LimitedServer()
    tight.limit = 20
    async with tight as server, running_env(LongEnv, tmp_path, server) as env:
        with pytest.raises(DataError, match=r"each of the \d+ questions is one with a prompt over the limit of 20"):
            await env._env_run.set_up()


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_finding_keeps_three_examples_and_cuts_them() -> None:
    report = DataReport("s", 10)
    for number in range(10):
        report.add("odd", "kept", f"{number} {'x' * 500}")
    finding = report.findings["odd"]
    assert (finding.count, len(finding.examples)) == (10, 3)
    assert all(len(example) < 130 for example in finding.examples)


def test_several_environments_write_into_one_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for name in ("a", "b", "a"):
        write_reports(path, name, [DataReport(f"of {name}", 3)])
    written = json.loads(path.read_text())["data"]
    assert {name: reports[0]["source"] for name, reports in written.items()} == {"a": "of a", "b": "of b"}


async def test_gsm8k_says_what_it_found_on_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path / "d.jsonl", *sums(1, 2, 3, 3, 3), {"question": "q", "answer": ""})
    async with (
        FakeInferenceServer() as server,
        running_env(GSM8kEnv, tmp_path, server, dataset_path=str(data), heldout_size=1) as env,
    ):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            await env._env_run.set_up()
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Data of ")]
    assert told[0].startswith(f"Data of {data}: 6 records, ")
    assert any("1 with an empty answer (left out): " in line for line in told)


def test_a_million_questions_take_seconds() -> None:
    items = [
        Problem(f"Question {number}: what is {number} plus one, and why is that so?", "1") for number in range(100_000)
    ]
    started = time.process_time()
    split(items, 64, 0, "the file")
    assert time.process_time() - started < 4  # ten times as many: below 40 s
