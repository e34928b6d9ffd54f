"""Two run directories in the form that records give them, for tests of the page.

`first` is running if asked for; step 2 has a group with thoughts and a tool call, step 3 one with a hostile answer. Its
evaluation of version 3 has 2 wrong answers of 6. `second` is another seed.
"""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from atroposlib.groups import group_id

STEPS = 3
START = 1_700_000_000.0
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
THOUGHT = "<think>First I multiply. Then I add.</think>I call a tool."
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*7"}}</tool_call>'
PROMPT, ANSWER = [1, 2, 3], [4, 5, 6, 7]
SAMPLED = [-0.25, -1.5, -0.001, -9.0]
TRAINED = [-0.25, -1.5000001, -0.0011, -8.5]  # the first has identical bits


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def metrics_row(step: int, reward: float | None = None) -> dict[str, Any]:
    return {
        "step": step,
        "policy_version": step,
        "time": START + 10 * step,
        "reward_mean": step / 4 if reward is None else reward,
        "reward_std": 0.25,
        "accuracy": None,
        "loss": 0.5 / step,
        "kl": None,
        "entropy": 2.0 / step,
        "grad_norm": 1.0,
        "completion_tokens": 200,
        "completion_tokens_per_rollout": 20.0,
        "staleness_mean": 0.0,
        "logprob_diff_mean": 1e-6,
        "logprob_diff_max": 1e-4,
        "sync_stall_s": 0.02,
        "step_s": 9.0,
        "generate_s": 4.0,
        "train_s": 4.5,
        "eval_wait_s": 0.5,
        "groups": 3,
        "zero_variance_groups": 1,
        "failed_rollouts": 0,
        "lr": 1e-5,
    }


def sample(step: int, number: int, question: str, answers: list[str], scores: list[float]) -> dict[str, Any]:
    """A group of the step; its answers have one token row each."""
    tokens = [[*PROMPT, *ANSWER, 10 * step + number, place] for place in range(len(answers))]
    return {
        "step": step - 1,
        "policy_version": step - 1,
        "group": group_id(tokens),
        "env": "sums",
        "started": START + 10 * (step - 1),
        "time": START + 10 * (step - 1) + number,
        "reference": "42",
        "dropped": None,
        "completion_tokens": [6] * len(answers),
        "scores": scores,
        "finish_reasons": ["stop"] * (len(answers) - 1) + ["length"],
        "tokens": tokens,
        "masks": [[-100] * 3 + row[3:] for row in tokens],
        "inference_logprobs": [[1.0] * 3 + SAMPLED + [-0.5, -0.5] for _ in tokens],
        "policy_versions": [[step - 1, step - 1] for _ in tokens],
        "messages": [
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for answer in answers
        ],
        "generation_params": {"temperature": 1.0},
    }


def trained(row: dict[str, Any]) -> dict[str, Any]:
    count = len(row["scores"])
    equal = len(set(row["scores"])) == 1
    return {
        "step": row["step"] + 1,
        "policy_version": row["policy_version"],
        "group": row["group"],
        "advantages": [0.0] * count if equal else [score * 2 - 1 for score in row["scores"]],
        "logprobs": [[*TRAINED, -0.5, -0.5] for _ in range(count)],
        "left_out": "all scores are equal" if equal else None,
    }


def samples() -> list[dict[str, Any]]:
    rows = []
    for step in range(1, STEPS + 1):
        rows.append(sample(step, 1, f"What is 6 * 7 in step {step}?", ["It is 41.", "It is 42."], [0.0, 1.0]))
        rows.append(sample(step, 2, f"What is {step} + 1?", ["right", "right"], [1.0, 1.0]))
    thinking = sample(2, 3, "Use the tool.", [THOUGHT + CALL, "No."], [1.0, 0.0])
    thinking["messages"][0] += [
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "The answer is 42."},
    ]
    hostile = sample(3, 3, f"Repeat: {HOSTILE}", [HOSTILE, f"<think>{HOSTILE}"], [1.0, 0.0])
    dropped = sample(3, 4, "Which group was dropped?", ["a", "b"], [0.5, 0.5]) | {"dropped": "2 of 2 answers are empty"}
    return [*rows, thinking, hostile, dropped]


def held_out(version: int, wrong: int, of: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "time": START + 10 * version,
            "env": "sums",
            "policy_version": version,
            "index": index,
            "messages": [
                {"role": "user", "content": f"Held-out question {index}?"},
                {"role": "assistant", "content": f"Held-out answer {index} of version {version}"},
            ],
            "reference": str(index),
            "score": 0.0 if index < wrong else 1.0,
            "finish_reason": "stop",
        }
        for index in range(of)
    ]


def write_run(run: Path, seed: int, model: Path) -> None:
    run.mkdir(parents=True)
    start = {
        "time": "2026-11-22T19:25:45+0000",
        "command": ["atropos", "run", "--seed", str(seed)],
        "seed": seed,
        "model": str(model),
        "commit": "d85160f8f4def190852d953974f103c1ad509d13",
        "planned_steps": 5,
        "machine": {"host": "lab", "processor": "a processor", "cores": 2, "memory_bytes": 2**34, "gpus": []},
    }
    (run / "run.json").write_text(json.dumps({"starts": [start]}))
    (run / "run.yaml").write_text(
        yaml.safe_dump({"steps": 5, "seed": seed, "trainer": {"lr": seed / 100}, "environments": {"sums": {}}})
    )
    append(run / "metrics.jsonl", *(metrics_row(step, step / 4 / seed) for step in range(1, STEPS + 1)))
    for version, wrong in ((0, 5), (3, 2)):
        accuracy = 1 - wrong / 6
        append(
            run / "evaluations.jsonl",
            {"time": START + 10 * version, "env": "sums", "policy_version": version, "accuracy": accuracy},
        )
        append(run / "held_out.jsonl", *held_out(version, wrong))
    rows = samples()
    append(run / "samples.jsonl", *rows)
    append(run / "trained.jsonl", *(trained(row) for row in rows if row["dropped"] is None))
    (run / "trainer.log").write_text("".join(f"line {n} of the trainer\n" for n in range(300)) + HOSTILE + "\n")
    (run / "api.log").write_text("the API's only line\n")


def write_model(model: Path) -> None:
    """A tokenizer of a few words, so that tokens have a text."""
    from tokenizers import Tokenizer, models

    words = ["<unk>", "user", "asks", ":", "It", " is", " 42", ".", HOSTILE, *(f" w{n}" for n in range(60))]
    model.mkdir()
    Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")).save(
        str(model / "tokenizer.json")
    )


def mark_running(run: Path) -> None:
    """As if this process were the launcher of the run."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (run / "pids").mkdir()
    (run / "pids" / "launcher").write_text(json.dumps({"pid": os.getpid(), "start": start, "boot": boot}))
