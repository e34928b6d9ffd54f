"""Run directories to look at, and a client of the window on them."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.testclient import TestClient

from atroposlib.groups import group_id
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.view.run_data.runs import Runs
from atroposlib.view.server import create_app
from atroposlib.wire.batching import NO_LOGPROB, NOT_TRAINED

STEP_S = 10.0  # the steps of a made-up run follow each other at this pace
START = 1_800_000_000.0


def client(*runs: Path, parent: Path | None = None) -> TestClient:
    """Of a window on these runs, or on all of `parent`."""
    return TestClient(create_app(Runs(runs, parent)), base_url="http://127.0.0.1")


def get(window: TestClient, path: str, **query: object) -> Any:
    """What a route answers; it must answer 200."""
    reply = window.get(path, params={key: str(value) for key, value in query.items()})
    assert reply.status_code == 200, reply.text
    return reply.json()


def write_rows(path: Path, rows: Iterable[object], mode: str = "w") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make_run(path: Path, steps: int = 3, groups: int = 2) -> Path:
    """A finished run with every file: in each step `groups` groups of two rollouts, right and wrong."""
    path.mkdir(parents=True)
    model = path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(tokenizer_file())
    start = {"time": "2027-01-15T08:00:00+0000", "command": ["atropos", "train"], "seed": 7, "model": str(model)}
    (path / "run.json").write_text(json.dumps({"starts": [start | {"commit": "abc"}]}))
    (path / "run.yaml").write_text("steps: 3\nseed: 7\nenvironments: {gsm8k: {group_size: 2}}\ntrainer: {lr: 0.1}\n")
    (path / "trainer.log").write_text("one\ntwo\x1b[31m\nthree\n")
    write_rows(path / "metrics.jsonl", (metrics_row(step) for step in range(1, steps + 1)))
    write_rows(path / "evaluations.jsonl", ({"time": START, "env": "gsm8k", "policy_version": 3, "accuracy": 0.5},))
    numbers = range(steps * groups)
    write_rows(path / "samples.jsonl", (sample(number, number // groups) for number in numbers))
    write_rows(path / "trained.jsonl", (trained(number, number // groups + 1) for number in numbers))
    write_rows(path / "held_out.jsonl", (held_out(index, version) for version in (0, 3) for index in range(4)))
    return path


@cache
def tokenizer_file() -> bytes:
    """Making one loads transformers, so it is made once."""
    with TemporaryDirectory() as folder:
        return (save_tiny_tokenizer(Path(folder) / "model") / "tokenizer.json").read_bytes()


def metrics_row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "reward_mean": step / 10,
        "loss": None,
        "time": START + step * STEP_S,
        "step_s": 9.0,
        "generate_s": 4.0,
        "train_s": 3.0,
        "eval_wait_s": 1.0,
    }


def tokens_of(number: int) -> list[list[int]]:
    """Of the two sequences of a group: two tokens of a prompt and three that were sampled."""
    return [[5, 6, 7, 8, 9 + number], [5, 6, 10, 11, 12 + number]]


def sample(number: int, version: int, **fields: Any) -> dict[str, Any]:
    """A row of samples.jsonl: a group whose first answer is right."""
    tokens = tokens_of(number)
    question = {"role": "user", "content": f"What is {number} + {number}?"}
    answers = [f"It is {2 * number}.", "I do not knöw <b>"]
    return {
        "step": version,
        "policy_version": version,
        "env": "gsm8k",
        "group": group_id(tokens),
        "started": START + version * STEP_S + 1,
        "time": START + version * STEP_S + 4,
        "dropped": None,
        "reference": str(2 * number),
        "failures": [],
        "completion_tokens": [3, 3],
        "tokens": tokens,
        "masks": [[NOT_TRAINED] * 2 + row[2:] for row in tokens],
        "inference_logprobs": [[NO_LOGPROB] * 2 + [-0.5, -0.25, -0.125]] * 2,
        "scores": [1.0, 0.0],
        "messages": [[question, {"role": "assistant", "content": answer}] for answer in answers],
        "version_spans": [[[0, version]], [[0, version], [4, version + 1]]],
        "finish_reasons": ["stop", "length"],
        "generation_params": {"temperature": 1.0},
        **fields,
    }


def trained(number: int, step: int, **fields: Any) -> dict[str, Any]:
    """A row of trained.jsonl."""
    return {
        "step": step,
        "policy_version": step,
        "group": group_id(tokens_of(number)),
        "advantages": [1.0, -1.0],
        "logprobs": [[-0.5, -0.25, -0.0625], None],
        "left_out": None,
        **fields,
    }


def held_out(index: int, version: int, **fields: Any) -> dict[str, Any]:
    """A row of held_out.jsonl: the last of four answers is wrong."""
    said = [{"role": "user", "content": f"Held out {index}?"}, {"role": "assistant", "content": f"{index}!"}]
    return {
        "time": START,
        "env": "gsm8k",
        "policy_version": version,
        "index": index,
        "messages": said,
        "reference": str(index),
        "score": 0.0 if index == 3 else 1.0,
        "finish_reason": "stop",
        **fields,
    }
