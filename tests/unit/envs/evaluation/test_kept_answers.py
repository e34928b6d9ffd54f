"""`evaluate` without `--samples` asks each held-out question of a paid server once, however often it is run."""

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.cli import load_tree, run
from atroposlib.processes import lock_files
from atroposlib.processes.lock_files import take_lock
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from environments.template_server import LargerNumberEnv
from environments.two_turn_template_server import GuessEnv

ROUTE = "/v1/chat/completions"


async def evaluate(server: FakeInferenceServer, *flags: str, env: Any = LargerNumberEnv, kind: str = "openai") -> int:
    given = ["--openai.base_url", server.base_url, "--openai.server_type", kind, "--openai.model_name", "fake"]
    given += ["--env.heldout_size", "4", *flags] if issubclass(env, (LargerNumberEnv, GuessEnv)) else flags
    return await run(env, "evaluate", load_tree(env, "evaluate", given, "env.py"))


def larger(prompt: str) -> str:
    return str(max(int(word) for word in prompt.replace(",", " ").replace("?", " ").split() if word.isdigit()))


def without_seconds(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if "seconds" not in line]


def text_of(path: str) -> str:
    return Path(path).read_text()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ([], "evaluations/larger_number-fake-greedy.jsonl"),
        (["--output", "mine.jsonl"], "mine.jsonl"),
        (["--env.data_dir_to_save_evals", "evals"], "evals/answers.jsonl"),
    ],
)
async def test_the_same_command_answers_from_what_is_recorded(flags: list[str], path: str, capsys: Any) -> None:
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, *flags) == 0
        first = capsys.readouterr().out
        assert server.hits[ROUTE] == 4
        written = [text_of(f"evals/{name}") for name in ("samples.jsonl", "answers.jsonl")] if "evals" in flags else []
        assert await evaluate(server, *flags) == 0
        assert server.hits[ROUTE] == 4
    assert without_seconds(capsys.readouterr().out) == without_seconds(first)
    assert "  accuracy" in first
    if "evals" in flags:
        assert [text_of(f"evals/{name}") for name in ("samples.jsonl", "answers.jsonl")] == written
    assert len(text_of(path).splitlines()) == 5


async def test_only_what_is_missing_or_failed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "mine.jsonl"
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--output", path) == 0
        header, *lines = text_of(path).splitlines()
        failed = json.dumps({**json.loads(lines[0]), "score": None, "error": "timeout: late"})
        killed_in_the_fourth = "\n".join([header, failed, lines[1], lines[2], lines[3][:30]])
        await asyncio.to_thread(Path(path).write_text, killed_in_the_fourth)
        server.hits.clear()
        assert await evaluate(server, "--output", path) == 0
        assert server.hits[ROUTE] == 2
        assert await evaluate(server, "--output", path) == 0
        assert server.hits[ROUTE] == 2


async def test_a_kill_while_the_last_line_is_cut_off_loses_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, content: bytes) -> None:
        os.truncate(path, 0)
        raise RuntimeError("killed")

    path = "mine.jsonl"
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--output", path) == 0
        os.truncate(path, len(text_of(path)) - 5)
        server.hits.clear()
        monkeypatch.setattr(Path, "write_bytes", killed)
        assert await evaluate(server, "--output", path) == 0
        assert server.hits[ROUTE] == 1


@pytest.mark.parametrize("flags", [[], ["--samples", "1"]])
@pytest.mark.parametrize("written", [0, 1, 40, -1])
async def test_an_evaluation_that_was_killed_in_its_first_line_begins_anew(flags: list[str], written: int) -> None:
    path = "mine.jsonl"
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--output", path, *flags) == 0
        whole = text_of(path).splitlines(keepends=True)
        os.truncate(path, len(whole[0][:written]))
        assert await evaluate(server, "--output", path, *flags) == 0
        assert len(text_of(path).splitlines()) == len(whole)


async def test_answers_of_several_turns_are_kept() -> None:
    async with FakeInferenceServer(lambda prompt: "It is 7." if "It is higher" in prompt else "It is 5.") as server:
        assert await evaluate(server, env=GuessEnv) == 0
        asked = server.hits[ROUTE]
        assert asked > 4
        assert await evaluate(server, env=GuessEnv) == 0
        assert server.hits[ROUTE] == asked


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--env.seed", "5"], "another prompts"),
        (["--env.max_new_tokens", "9"], "another max_new_tokens"),
        (["--openai.model_name", "other"], "another model"),
    ],
)
async def test_another_evaluation_is_refused(flags: list[str], said: str, caplog: Any) -> None:
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--output", "mine.jsonl") == 0
        assert await evaluate(server, "--output", "mine.jsonl", *flags) == 1
        assert server.hits[ROUTE] == 4
    assert said in caplog.text


async def test_another_code_is_another_evaluation(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--output", "mine.jsonl") == 0
        monkeypatch.setattr("atroposlib.envs.evaluation.kept_answers.code_of", lambda env_cls: "edited")
        assert await evaluate(server, "--output", "mine.jsonl") == 1
    assert "another code" in caplog.text


async def test_a_server_of_ours_is_asked_again_unless_the_file_is_named(folder: Path) -> None:
    tokenizer = ["--env.tokenizer_name", str(save_tiny_tokenizer(folder / "tokenizer"))]
    async with FakeInferenceServer(larger) as server:
        for _ in range(2):
            assert await evaluate(server, "--env.data_dir_to_save_evals", "evals", *tokenizer, kind="vllm") == 0
        assert server.hits["/generate"] == 8, "its weights may be others"
        for _ in range(2):
            assert await evaluate(server, "--output", "mine.jsonl", *tokenizer, kind="vllm") == 0
        assert server.hits["/generate"] == 12


async def test_paid_samples_are_not_replaced(caplog: Any) -> None:
    async with FakeInferenceServer(larger) as server:
        into = ["--env.data_dir_to_save_evals", "evals"]
        assert await evaluate(server, *into, "--samples", "1") == 0
        kept = text_of("evals/samples.jsonl")
        assert await evaluate(server, *into) == 1
    assert "has samples of `evaluate --samples`" in caplog.text
    assert text_of("evals/samples.jsonl") == kept


async def test_an_evaluation_of_the_authors_own_says_that_it_asks_again(caplog: Any, monkeypatch: Any) -> None:
    async def own(self: LargerNumberEnv) -> dict[str, float]:
        return {"accuracy": 1.0}

    monkeypatch.setattr(LargerNumberEnv, "evaluate", own)
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--output", "mine.jsonl") == 0
    assert "LargerNumberEnv has an evaluate of its own: the same command asks everything again, and mine.jsonl" in (
        caplog.text
    )
    assert "mine.jsonl" not in os.listdir()


async def test_the_directory_of_evaluations_may_be_the_working_directory(folder: Path) -> None:
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--env.data_dir_to_save_evals", ".") == 0
    assert {"evaluate_config.yaml", "metrics.json", "samples.jsonl", "samples.html"} <= set(os.listdir(folder))


async def test_beside_the_directory_of_evaluations_nothing_is_written(folder: Path, monkeypatch: Any) -> None:
    evals, opened = folder / "evals", list[str]()
    evals.mkdir()

    def take(lock: Path) -> int:
        opened.append(str(lock.parent))
        return take_lock(lock)

    monkeypatch.setattr(lock_files, "take_lock", take)
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--env.data_dir_to_save_evals", str(evals)) == 0
    assert set(opened) == {str(evals)}


AT_ONCE = {
    "": "larger_number-fake-greedy.jsonl",
    "--output mine.jsonl": "mine.jsonl",
    "--env.data_dir_to_save_evals evals": "evals",
    "--samples 2": "larger_number-fake.jsonl",
    "--samples 2 --output mine.jsonl": "mine.jsonl",
}


@pytest.mark.parametrize(("flags", "named"), AT_ONCE.items())
async def test_of_two_equal_commands_at_once_the_second_is_refused_by_file_and_process(
    flags: str, named: str, caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    async with FakeInferenceServer(larger) as server:
        statuses = await asyncio.gather(*(evaluate(server, *flags.split()) for _ in range(2)))
        asked = server.hits[ROUTE]
        assert sorted(statuses) == [0, 1]
        assert asked == (8 if "--samples" in flags else 4)
        (refusal,) = [record.getMessage() for record in caplog.records if "is being written by" in record.getMessage()]
        who = f"process {os.getpid()} on {socket.gethostname()}"
        assert f"{named} is being written by {who}, another evaluation: wait for its end" in refusal
        assert await evaluate(server, *flags.split()) == 0  # the lock has gone with its holder
        assert server.hits[ROUTE] == asked
    assert not [name for *_, names in os.walk(folder) for name in names if name.endswith(".lock")]


async def test_a_lock_that_a_killed_evaluation_left_holds_nobody_up(folder: Path) -> None:
    (folder / ".mine.jsonl.lock").write_text("999999")
    async with FakeInferenceServer(larger) as server:
        assert await evaluate(server, "--output", "mine.jsonl") == 0
