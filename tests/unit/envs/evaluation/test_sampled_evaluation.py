"""Any OpenAI-compatible server is evaluated without token ids or tokenizer; an interrupted evaluation continues."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.cli import load_tree, run
from atroposlib.envs.evaluation.evaluation_metrics import Prices, Sample, pass_at_k, summary
from atroposlib.envs.files.html_report import write_html
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.utils.tokenizers import load_tokenizer
from environments.template_server import LargerNumberEnv
from environments.tool_template_server import ProductEnv
from environments.two_turn_template_server import GuessEnv
from tests.unit.environments.openenv_fake import FakeOpenEnv

Lines = list[dict[str, Any]]


def alternating() -> Callable[[str], str]:
    """The larger number, and the smaller, in turn for each question."""
    asked: dict[str, int] = {}

    def answer(prompt: str) -> str:
        asked[prompt] = asked.get(prompt, 0) + 1
        numbers = [int(word) for word in prompt.replace(",", " ").replace("?", " ").split() if word.isdigit()][:2]
        return str(max(numbers) if asked[prompt] % 2 else min(numbers))

    return answer


async def evaluate(server: FakeInferenceServer, path: Path, *flags: str, env: Any = LargerNumberEnv) -> int:
    given = ["--openai.base_url", server.base_url, "--openai.server_type", "openai", "--openai.model_name", "fake"]
    given += ["--env.heldout_size", "3", "--output", str(path), "--concurrency", "2", *flags]
    return await run(env, "evaluate", load_tree(env, "evaluate", given, "env.py"))


def lines_of(path: Path) -> tuple[dict[str, Any], Lines]:
    first, *others = [json.loads(line) for line in path.read_text().splitlines()]
    return first["evaluation"], others


async def test_samples_are_scored_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "larger.jsonl"
    async with FakeInferenceServer(alternating(), api_key="key") as server:
        assert await evaluate(server, path, "--samples", "4", "--openai.api_key", "key", "--temperature", "0.7") == 0
        assert server.hits["/v1/chat/completions"] == 12
        assert server.hits["/generate"] == 0
        assert server.peak_in_flight <= 2
    asked, lines = lines_of(path)
    assert (asked["environment"], asked["model"], asked["questions"], asked["temperature"]) == (
        "larger_number", "fake", 3, 0.7,
    )  # fmt: skip
    assert {(line["question"], line["sample"]) for line in lines} == {(q, s) for q in range(3) for s in range(4)}
    assert sorted(line["score"] for line in lines) == [0.0] * 6 + [1.0] * 6
    assert all(line["completion_tokens"] > 0 and line["prompt_tokens"] > 0 for line in lines)
    assert lines[0]["messages"][-1]["role"] == "assistant"
    shown = capsys.readouterr().out
    assert "larger_number, fake\n" in shown
    assert "questions, samples, failed  3 12 0\n" in shown
    assert "avg@4                       50.0 % ± 0.0\n" in shown
    assert "pass@1                      50.0 %\n" in shown
    assert "pass@2                      83.3 %\n" in shown
    assert "pass@4                      100.0 %\n" in shown


@pytest.mark.parametrize(("hook", "failed"), [("prompt", 2), ("reference_answer", 0)])
async def test_a_hook_that_raises_for_one_question_costs_that_question(
    tmp_path: Path, hook: str, failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "larger.jsonl", getattr(LargerNumberEnv, hook)
    bad: list[Any] = []

    def raises_for_first(self: LargerNumberEnv, item: list[int]) -> Any:
        bad[:] = bad or [item]
        if item == bad[0]:
            raise KeyError("x")
        return whole(self, item)

    monkeypatch.setattr(LargerNumberEnv, hook, raises_for_first)
    async with FakeInferenceServer(alternating()) as server:
        assert await evaluate(server, path, "--samples", "2") == 0
    lines = lines_of(path)[1]
    assert len(lines) == 6
    assert sum(line["error"] is not None for line in lines) == failed


async def test_an_interrupted_evaluation_samples_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "larger.jsonl"
    async with FakeInferenceServer(alternating()) as server:
        assert await evaluate(server, path, "--samples", "2") == 0
        kept = path.read_text().splitlines(keepends=True)
        failed = {**json.loads(kept[2]), "score": None, "error": "timeout"}
        path.write_text("".join(kept[:2]) + json.dumps(failed) + "\n" + kept[3][:20])  # killed while it wrote
        server.hits.clear()
        assert await evaluate(server, path, "--samples", "3") == 0
        assert server.hits["/v1/chat/completions"] == 9 - 1
    _, lines = lines_of(path)
    assert len({(line["question"], line["sample"]) for line in lines if line["score"] is not None}) == 9


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--temperature", "0.5"], "has samples with another temperature (1.0, now 0.5); choose another --output"),
        (["--env.seed", "5"], "has samples with another prompts"),
        (["--openai.model_name", "other"], "has samples with another model (fake, now other)"),
    ],
)
async def test_samples_of_other_settings_are_not_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: list[str], said: str
) -> None:
    path = tmp_path / "larger.jsonl"
    async with FakeInferenceServer(alternating()) as server:
        assert await evaluate(server, path, "--samples", "1") == 0
        assert await evaluate(server, path, "--samples", "1", *flags) == 1
    assert said in caplog.text


async def test_a_file_of_something_else_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"a": 1}\n')
    async with FakeInferenceServer(alternating()) as server:
        assert await evaluate(server, path, "--samples", "1") == 1
    assert "is not a file of samples" in caplog.text
    assert path.read_text() == '{"a": 1}\n'


async def test_a_failed_sample_has_no_score_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []

    async def score(self: LargerNumberEnv, item: list[int], answer: str) -> float | None:
        scored.append(answer)
        if len(scored) == 1:
            raise RuntimeError("broken")
        return None if len(scored) == 2 else 1.0

    monkeypatch.setattr(LargerNumberEnv, "score", score)
    path = tmp_path / "larger.jsonl"
    async with FakeInferenceServer(alternating()) as server:
        assert await evaluate(server, path, "--samples", "1") == 0
    _, lines = lines_of(path)
    errors = sorted(line["error"] for line in lines if line["error"])
    assert errors[0] == "not scored"
    assert errors[1].startswith("scorer: ")
    assert [line["score"] for line in lines if not line["error"]] == [1.0]
    assert "questions, samples, failed  1 1 2\n" in capsys.readouterr().out


def guesser(prompt: str) -> str:
    """5, and 7 where 5 is too low: text only, as any API gives."""
    return "It is 7." if "It is higher" in prompt else "It is 5."


async def test_several_turns_are_sampled_from_a_server_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "guess.jsonl"
    async with FakeInferenceServer(guesser) as server:
        flags = ["--samples", "2", "--env.heldout_size", "9", "--price-in", "2", "--price-out", "10"]
        assert await evaluate(server, path, *flags, env=GuessEnv) == 0
        assert server.hits["/generate"] == 0
    _, lines = lines_of(path)
    assert {line["reference"]: line["score"] for line in lines} == {
        line["reference"]: float(line["reference"] in ("5", "7")) for line in lines
    }
    assert {len(line["messages"]) for line in lines if line["reference"] == "5"} <= {2}
    assert {len(line["messages"]) for line in lines if line["reference"] == "7"} <= {4}
    tokens = sum(2 * line["prompt_tokens"] + 10 * line["completion_tokens"] for line in lines)
    assert f"  cost                        {tokens / 1e6:.4g}\n" in capsys.readouterr().out


async def test_the_samples_are_a_page_that_fetches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def score(self: LargerNumberEnv, item: list[int], answer: str) -> float:
        if answer == "<b>7":
            raise RuntimeError("<i>broken")
        return 1.0

    monkeypatch.setattr(LargerNumberEnv, "score", score)
    answers = iter(["<b>7", "8", "9"])
    async with FakeInferenceServer(lambda prompt: next(answers)) as server:
        assert await evaluate(server, tmp_path / "larger.jsonl", "--samples", "1", "--concurrency", "1") == 0
        page = (tmp_path / "larger.html").read_text()
        assert "<pre>larger_number, fake\n  questions, samples, failed  2 2 1\n" in page
        assert (
            "<details open><summary>Question 0: 0 samples and 1 without a score, mean score 0.000<span class=question>"
            in page
        )
        assert "no score: scorer: RuntimeError: &lt;i&gt;broken" in page
        assert "&lt;b&gt;7" in page
        assert "<details><summary>Question 1: 1 samples, mean score 1.000<span class=question>" in page
        assert not {"<b>", "<i>", "<script", "http:", "https:"} & {word for word in page.replace(">", "> ").split()}
        assert f"Every sample: {tmp_path / 'larger.html'}\n" in capsys.readouterr().out
        answers = iter(["8"])  # the sample that failed is taken again, and replaces it on the page
        assert await evaluate(server, tmp_path / "larger.jsonl", "--samples", "1") == 0
    page = (tmp_path / "larger.html").read_text()
    assert page.count("<summary>Question 0: 1 samples, mean score 1.000<span class=question>") == 1
    assert "no score" not in page


async def test_saved_evaluations_have_their_samples_in_one_directory(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    given = ["--openai.server_type", "openai", "--openai.model_name", "fake", "--env.heldout_size", "3"]
    async with FakeInferenceServer(alternating()) as server:
        given += ["--openai.base_url", server.base_url, "--env.data_dir_to_save_evals", str(folder), "--samples", "2"]
        tree = load_tree(LargerNumberEnv, "evaluate", given, "env.py")
        assert await run(LargerNumberEnv, "evaluate", tree) == 0
    assert {path.name for path in folder.iterdir()} == {
        "samples.jsonl", "samples.html", "metrics.json", "table.txt", "evaluate_config.yaml",
    }  # fmt: skip
    saved = json.loads((folder / "metrics.json").read_text())
    assert saved["results"]["all"]["avg@2"] == saved["results"]["all"]["accuracy"] == 0.5
    assert saved["config_general"]["generation_parameters"]["temperature"] == 1.0
    assert saved["config_general"]["total_evaluation_time_seconds"] > 0


def multiplier(prompt: str) -> str:
    """Calls the tool, and repeats its result."""
    question = prompt.rpartition("What is ")[2]
    a, b = [int(word) for word in question.replace("?", " ").split() if word.isdigit()][:2]
    if str(a * b) in question:
        return f"It is {a * b}."
    return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


async def test_an_environment_with_a_tool_is_evaluated_by_any_server(tmp_path: Path) -> None:
    path = tmp_path / "product.jsonl"
    async with FakeInferenceServer(multiplier) as server:
        assert await evaluate(server, path, "--samples", "2", env=ProductEnv) == 0
        assert server.hits["/generate"] == 0
        asked = [body for where, body in server.requests if where == "/v1/chat/completions"]
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["multiply"]
    _, lines = lines_of(path)
    assert [line["score"] for line in lines] == [1.0] * 6
    assert {tuple(message["role"] for message in line["messages"]) for line in lines} == {
        ("user", "assistant", "tool", "assistant")
    }


@pytest.mark.parametrize("env", [LargerNumberEnv, GuessEnv])
async def test_the_environments_own_evaluation_needs_no_tokens_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: Any
) -> None:
    folder = tmp_path / "results"
    answer = guesser if env is GuessEnv else alternating()
    async with FakeInferenceServer(answer) as server:
        flags = ["--env.data_dir_to_save_evals", str(folder)]
        assert await evaluate(server, tmp_path / "answers.jsonl", *flags, env=env) == 0
        assert server.hits["/generate"] == 0
    shown = capsys.readouterr().out
    saved = json.loads((folder / "metrics.json").read_text())
    accuracy = saved["results"]["all"]["accuracy"]
    assert f"{env.name}, fake\n  accuracy     {accuracy:.4g}\n" in shown
    assert (folder / "table.txt").read_text() in shown
    assert f"Every answer: {folder / 'samples.html'}\n" in shown
    assert saved["config_general"]["total_evaluation_time_seconds"] > 0
    assert saved["config_general"]["generation_parameters"]["temperature"] == 0.0
    assert (folder / "samples.html").read_text().count("<summary>Question ") == 3
    write_html(folder / "samples.jsonl", tmp_path / "again.html")  # as jsonl2html does
    assert (tmp_path / "again.html").read_text().count("<summary>Question ") == 3
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 4


async def test_a_wrong_key_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "right")
    async with FakeInferenceServer(alternating(), api_key="right") as server:
        assert await evaluate(server, tmp_path / "x.jsonl", "--openai.api_key", "wrong") == 1
        assert caplog.records[-1].message.endswith('replied 401: {"error": {"message": "wrong API key"}}')
        assert caplog.records[-1].exc_info is None
        assert await evaluate(server, tmp_path / "x.jsonl", "--openai.api_key_env", "MY_KEY") == 0


def test_the_variable_of_a_key_must_be_set(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(SystemExit):
        load_tree(LargerNumberEnv, "evaluate", ["--openai.api_key_env", "MY_KEY"], "env.py")
    assert "the environment variable MY_KEY is not set" in capsys.readouterr().err


async def test_an_openenv_environment_is_evaluated_by_a_server_of_text(tmp_path: Path) -> None:
    from environments.openenv_server import OpenEnv

    path = tmp_path / "guess.jsonl"
    async with (
        FakeOpenEnv() as openenv,
        FakeInferenceServer(lambda prompt: "4" if "too low" in prompt else "3") as server,
    ):
        assert await evaluate(server, path, "--samples", "2", "--env.url", openenv.url, env=OpenEnv) == 0
    _, lines = lines_of(path)
    assert [line["score"] for line in lines] == [1.0] * 6
    assert {line["outcome"] for line in lines} == {"finished"}
    assert all(line["completion_tokens"] >= 2 for line in lines)


async def test_a_model_must_be_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeInferenceServer(alternating()) as server:
        given = ["--openai.base_url", server.base_url, "--openai.server_type", "openai"]
        assert await run(LargerNumberEnv, "evaluate", load_tree(LargerNumberEnv, "evaluate", given, "env.py")) == 2
    assert "--openai.model_name" in caplog.text


def test_without_a_tokenizer_its_use_is_named() -> None:
    with pytest.raises(ValueError, match=r"this needs a tokenizer \(encode\): name one with --env\.tokenizer_name"):
        load_tokenizer("none").encode("a")


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


def test_a_question_with_failed_samples_counts_as_much_as_others() -> None:
    samples = [Sample(0, 0, 1.0), Sample(0, 1, 1.0), Sample(1, 0, 0.0), Sample(1, 1, None, error="timeout")]
    numbers = summary(samples, 2, right_from=1.0)
    assert numbers["accuracy"] == 0.5
    assert numbers["pass@2"] == 1.0  # of the question that has two
    assert (numbers["samples"], numbers["failed"]) == (3, 1)
    assert numbers["standard_error"] == pytest.approx(0.5)
    assert "cost" not in numbers


def test_the_cost_is_of_prompts_and_answers() -> None:
    samples = [Sample(0, 0, 1.0, tokens=(1000, 100)), Sample(0, 1, None, tokens=(500, 50), error="timeout")]
    assert summary(samples, 2, 1.0, Prices(2.0, 10.0))["cost"] == pytest.approx((1500 * 2 + 150 * 10) / 1e6)


def test_a_score_that_rounding_keeps_below_the_threshold_is_right() -> None:
    assert summary([Sample(0, 0, 0.7 + 0.2 + 0.1), Sample(0, 1, 0.999)], 2, right_from=1.0)["accuracy"] == 0.5


def test_samples_that_were_not_asked_for_count_nowhere() -> None:
    asked = [Sample(0, 0, 1.0, tokens=(10, 1)), Sample(0, 1, 1.0, tokens=(10, 1))]
    more = [Sample(0, 2, 0.0, tokens=(10, 1)), Sample(0, 3, None, tokens=(10, 1), error="timeout")]
    assert summary([*asked, *more], 2, 1.0) == summary(asked, 2, 1.0)
