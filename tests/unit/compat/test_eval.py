import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from atroposlib.compat.eval import EvalBase, eval_runner, evaluate_log, pass_at_k
from atroposlib.testing.fake_inference_server import FakeInferenceServer


@pytest.mark.parametrize(("m", "c", "k"), [(4, 1, 1), (5, 2, 3), (6, 6, 2), (6, 0, 2), (4, 3, 2), (3, 2, 3)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(m: int, c: int, k: int) -> None:
    draws = list(itertools.combinations([True] * c + [False] * (m - c), k))
    assert math.isclose(pass_at_k(m, c, k), sum(map(any, draws)) / len(draws))
    assert pass_at_k(m, float(c), k) == pass_at_k(m, c, k)  # a sum of rewards


@pytest.mark.parametrize(
    ("m", "c", "k"), [(4, 0, 5), (4, 4, 5), (4, 1, 0), (4, 1, -1), (0, 0, 1), (4, 5, 1), (4, -1, 1)]
)
def test_what_cannot_be_drawn_is_refused_and_does_not_count_as_right(m: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {m} samples with {c} right is not defined"):
        pass_at_k(m, c, k)


class Doubling(EvalBase):
    factor = 2

    def setup_data(self) -> list[int]:
        return [1, 2, 3, 4]

    async def run_item(self, server: Any, data_item: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        completion = await self.chat_completion(server, [{"role": "user", "content": str(data_item)}])
        texts = [choice.message.content for choice in completion.choices]
        right = sum(text == str(data_item * self.factor) for text in texts)
        return {"pass@1": pass_at_k(len(texts), right, 1)}, [{"question": data_item, "answers": texts}]


async def test_evaluation_is_asked_averaged_and_written(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: ["4", "6"]) as server:
        evaluation = Doubling(pass_at_n=1, pass_at_n_samples=2, temperature=0.7, eval_dir=str(tmp_path), extra="kept")
        metrics = await eval_runner(evaluation, ["--server-url", server.base_url, "--model-name", "m"])
        (path, request), *_ = server.requests
    assert metrics == {"pass@1": 0.25}
    assert vars(evaluation)["extra"] == "kept"
    assert path == "/v1/chat/completions"
    assert (request["n"], request["temperature"], request["model"]) == (2, 0.7, "m")
    assert "max_tokens" not in request
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["results"]["atropos|Doubling@1:2|0"] == written["results"]["all"] == metrics
    assert written["config_general"]["generation_parameters"] == {
        "temperature": 0.7,
        "n": 2,
        "top_p": 1.0,
        "max_tokens": -1,
    }
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [{"question": number, "answers": ["4", "6"]} for number in (1, 2, 3, 4)] == [sample[0] for sample in samples]


async def test_limit_of_tokens_is_sent_when_set() -> None:
    async with FakeInferenceServer(lambda prompt: "4") as server:
        await eval_runner(Doubling(max_tokens=3), ["--server-url", server.base_url])
        assert {request["max_tokens"] for _, request in server.requests} == {3}


async def test_evaluation_without_questions_says_so() -> None:
    class Empty(Doubling):
        def setup_data(self) -> list[int]:
            return []

    with pytest.raises(ValueError, match="Empty@1 has no questions"):
        await eval_runner(Empty(), ["--server-url", "http://127.0.0.1:1/v1"])


def test_nothing_is_written_without_a_folder(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluate_log({"accuracy": 1.0})
    assert "eval_dir is not set" in caplog.text
    assert not list(tmp_path.iterdir())
