"""Any OpenAI-compatible server is evaluated without token ids or tokenizer; an interrupted evaluation continues."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.cli import load_tree, run
from atroposlib.envs.sampled_evaluation import Sample, pass_at_k, summary
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.utils.tokenizers import load_tokenizer
from environments.template_server import LargerNumberEnv
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
    assert "solved                      50.0 % ± 0.0\n" in shown
    assert "pass@1                      50.0 %\n" in shown
    assert "pass@2                      83.3 %\n" in shown
    assert "pass@4                      100.0 %\n" in shown


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


async def test_the_environments_own_evaluation_needs_no_tokens_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with FakeInferenceServer(alternating()) as server:
        assert await evaluate(server, tmp_path / "none.jsonl") == 0
    assert "Evaluation: {'accuracy': 1.0" in caplog.text
    assert not (tmp_path / "none.jsonl").exists()


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
        assert await run(LargerNumberEnv, "evaluate", load_tree(LargerNumberEnv, "evaluate", given, "env.py")) == 1
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
