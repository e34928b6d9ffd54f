"""Five runs as a laboratory has them, for the pictures in docs/: three that have finished, one that died, and one
that starts. Every number is made up, by a generator with a seed; the files are those of real runs.
"""

import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import yaml

from atroposlib.groups import group_id
from tests.unit.view.page_runs import append, mark_running

START = 1_795_600_000.0  # in November 2026
STEP_S = 6.2
ROLLOUTS, GROUPS = 8, 8
HELD_OUT = 64
NAMES = ("arithmetic-baseline", "arithmetic-higher-lr", "two-environments", "arithmetic-long", "gsm8k-1.5b-lora")
MACHINE = {"host": "lab-3", "processor": "AMD EPYC 9354P", "cores": 32, "memory_bytes": 128 << 30, "gpus": []}


class Words:
    """A token for each word, whose text is the word with the space before it."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<unk>": 0}

    def tokens(self, text: str) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\s?\S+|\s", text)]

    def write(self, model: Path) -> None:
        from tokenizers import Tokenizer, models

        model.mkdir(parents=True, exist_ok=True)
        Tokenizer(models.WordLevel(self.ids, unk_token="<unk>")).save(str(model / "tokenizer.json"))


class RunWriter:
    """Writes the files of one run, step by step. `skill` is the share of right answers at the start, and at best."""

    def __init__(
        self, run: Path, seed: int, model: Path, words: Words, recipe: str, steps: int, lr: float, **settings: Any
    ) -> None:
        self.run, self.steps, self.lr, self.words = run, steps, lr, words
        self.random = random.Random(seed)
        self.environments: list[str] = settings.pop("environments", ["arithmetic"])
        self.skill: tuple[float, float] = settings.pop("skill", (0.08, 0.95))
        self.pace: float = settings.pop("pace", 3.2)
        self.bridge: str = settings.pop("bridge", "broadcast")
        self.age_s: float = settings.pop("age_s", 0.0)
        run.mkdir(parents=True)
        self._write_settings(seed, model, recipe, settings)

    def right(self, step: int, env: int = 0) -> float:
        """Return how likely an answer of this step is right."""
        low, high = self.skill
        rise = 1 / (1 + math.exp(-(step - 6.5 - 3 * env) * self.pace / 6))
        fall = 0.012 * max(0, step - 14) * (self.lr > 5e-5)
        return max(0.02, min(0.99, low + (high - low - 0.2 * env) * rise - 4 * fall))

    def write(self, done: int) -> None:
        self.evaluate(0)
        for step in range(1, done + 1):
            groups = [self.group(step, number) for number in range(GROUPS)]
            append(self.run / "samples.jsonl", *groups)
            append(self.run / "trained.jsonl", *(self.trained(step, group) for group in groups))
            append(self.run / "metrics.jsonl", self.metrics(step, groups))
            if step % 5 == 0:
                self.evaluate(step)
        for path in self.run.iterdir():
            os.utime(path, (self.time(done), self.time(done)))

    def group(self, step: int, number: int) -> dict[str, Any]:
        env = number % len(self.environments)
        question, reference, answers, scores = self.answers(step, env)
        prompt = self.words.tokens(f"<user> {question} <assistant>")
        said = [self.words.tokens(answer) for answer in answers]
        began = self.time(step) - STEP_S + 0.3 * number
        return {
            "step": step - 1,
            "policy_version": step - 1,
            "group": group_id([[*prompt, *answer, step, number, place] for place, answer in enumerate(said)]),
            "env": self.environments[env],
            "started": began,
            "time": began + 1.4 + 0.2 * self.random.random(),
            "reference": reference,
            "dropped": None,
            "completion_tokens": [len(answer) for answer in said],
            "scores": scores,
            "finish_reasons": ["length" if answer.endswith("…") else "stop" for answer in answers],
            "tokens": [prompt + answer for answer in said],
            "masks": [[-100] * len(prompt) + answer for answer in said],
            "inference_logprobs": [[1.0] * len(prompt) + [self.logprob() for _ in answer] for answer in said],
            "policy_versions": [[step - 1, step - 1] for _ in said],
            "messages": [
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for answer in answers
            ],
            "generation_params": {"temperature": 1.0, "max_tokens": 64},
        }

    def answers(self, step: int, env: int) -> tuple[str, str, list[str], list[float]]:
        first, second, third = (self.random.randint(2, 48) for _ in range(3))
        right = first + second * third
        question = f"What is {first} + {second} * {third}? End with the number alone on the last line."
        if env:
            question = f"Use {first}, {second} and {third} once each to reach {right}."
        answers, scores = [], []
        for _ in range(ROLLOUTS):
            is_right = self.random.random() < self.right(step, env)
            wrong = (first + second) * third if self.random.random() < 0.6 else right + self.random.choice([-10, 10, 2])
            value = right if is_right else wrong
            steps = (
                f"First {second} * {third} = {second * third}.\nThen {first} + {second * third} = {value}.\n\n{value}"
            )
            short = f"{first} + {second} * {third} = {value}\n\n{value}"
            answer = steps if self.random.random() < 0.35 else short
            if not is_right and self.random.random() < 0.12:
                answer, value = f"We look at {first}, {second} and {third}, and think of the order in which …", -1
            answers.append(answer)
            scores.append(1.0 if is_right else 0.0)
        return question, str(right), answers, scores

    def logprob(self) -> float:
        return -round(self.random.choice([0.001, 0.02, 0.3, 1.2, 2.9]) * (0.2 + self.random.random()), 6)

    def trained(self, step: int, group: dict[str, Any]) -> dict[str, Any]:
        scores = group["scores"]
        mean = sum(scores) / len(scores)
        spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
        sampled = [[value for value in row if value <= 0] for row in group["inference_logprobs"]]
        return {
            "step": step,
            "policy_version": step,
            "group": group["group"],
            "advantages": [(score - mean) / spread if spread else 0.0 for score in scores],
            "logprobs": [[value + self.difference() for value in row] for row in sampled],
            "left_out": None if spread else "all scores are equal",
        }

    def difference(self) -> float:
        """Of trainer and sampler: half of the tokens have identical bits."""
        return (
            0.0 if self.random.random() < 0.5 else self.random.choice([-1, 1]) * 10 ** self.random.uniform(-7.5, -1.6)
        )

    def metrics(self, step: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
        scores = [score for group in groups for score in group["scores"]]
        mean = sum(scores) / len(scores)
        tokens = sum(sum(group["completion_tokens"]) for group in groups)
        noise = self.random.gauss
        waits, trains = 2.1 + noise(0, 0.15), 3.4 + noise(0, 0.2)
        return {
            "step": step,
            "policy_version": step,
            "time": self.time(step),
            "reward_mean": mean,
            "reward_std": math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores)),
            "accuracy": None,
            "loss": 0.02 * math.exp(-step / 9) + noise(0, 0.004),
            "pg_loss": 0.02 * math.exp(-step / 9) + noise(0, 0.004),
            "kl": None,
            "entropy": 0.22 + 0.9 * math.exp(-step / 6) + abs(noise(0, 0.02)),
            "ratio_mean": 1.0,
            "ratio_clipped_frac": 0.0,
            "grad_norm": 0.6 + 2.2 * math.exp(-step / 5) + abs(noise(0, 0.25)),
            "lr": self.lr,
            "completion_tokens": tokens,
            "completion_tokens_per_rollout": tokens / len(scores),
            "trained_tokens": tokens,
            "logprob_diff_mean": 10 ** noise(-6.1, 0.08),
            "logprob_diff_max": 10 ** noise(-4.2, 0.25),
            "staleness_mean": 0.0,
            "staleness_max": 0,
            "zero_variance_groups": len([group for group in groups if len(set(group["scores"])) == 1]),
            "cut_answers": sum(group["finish_reasons"].count("length") for group in groups),
            "failed_rollouts": 0,
            "groups": len(groups),
            "rollouts": len(scores),
            "sync_stall_s": 0.024 + abs(noise(0, 0.003)),
            "sync_bytes": 269_000_000,
            "generate_s": waits,
            "train_s": trains,
            "step_s": waits + trains + 0.12,
            "eval_wait_s": 0.3,
        }

    def evaluate(self, version: int) -> None:
        for env, name in enumerate(self.environments):
            rows: list[dict[str, Any]] = []
            for index in range(HELD_OUT):
                question, reference, answers, _ = self.answers(version, env)
                is_right = self.random.random() < self.right(version, env)
                answer = f"… = {reference}\n\n{reference}" if is_right else answers[0]
                rows.append(
                    {
                        "time": self.time(version),
                        "env": name,
                        "policy_version": version,
                        "index": index,
                        "messages": [
                            {"role": "user", "content": question},
                            {"role": "assistant", "content": answer},
                        ],
                        "reference": reference,
                        "score": float(answer.endswith(reference)),
                        "finish_reason": "stop",
                    }
                )
            append(self.run / "held_out.jsonl", *rows)
            accuracy = sum(row["score"] for row in rows) / HELD_OUT
            about = {"time": self.time(version), "env": name, "policy_version": version, "accuracy": accuracy}
            append(self.run / "evaluations.jsonl", about)

    def time(self, step: int) -> float:
        return START - self.age_s + 50 + STEP_S * step

    def log(self, service: str, *lines: str) -> None:
        at = _iso(self.time(self.steps))[:19].replace("T", " ")
        with (self.run / f"{service}.log").open("a") as file:
            file.writelines(f"{at} {line}\n" for line in lines)
        os.utime(self.run / f"{service}.log", (self.time(self.steps), self.time(self.steps)))

    def note(self, note: str, *tags: str) -> None:
        (self.run / "notes.json").write_text(json.dumps({"note": note, "tags": tags}))

    def _write_settings(self, seed: int, model: Path, recipe: str, more: dict[str, Any]) -> None:
        start = {
            "time": _iso(START - self.age_s),
            "command": ["atropos", "train", recipe, "--steps", str(self.steps), "--seed", str(seed)],
            "seed": seed,
            "model": str(model),
            "commit": "1af78bf3c5d24e60b1f4b2a9e7c0d4418d9b6a52",
            "planned_steps": self.steps,
            "machine": MACHINE,
        }
        (self.run / "run.json").write_text(json.dumps({"starts": [start]}))
        trainer = {"lr": self.lr, **more}
        chosen = {
            "model": str(model),
            "steps": self.steps,
            "bridge": {"kind": self.bridge},
            "environments": {name: {"group_size": ROLLOUTS, "max_new_tokens": 64} for name in self.environments},
            "trainer": trainer,
            "vllm": {"max_model_len": 256, "port": 9001 + seed},
            "api": {"port": 8000 + seed},
        }
        (self.run / "run.yaml").write_text(yaml.safe_dump(chosen, sort_keys=False))
        defaults = {"algorithm": "grpo", "kl_coef": 0.0, "max_grad_norm": 1.0, "batch_size": 8, "seq_len": 256}
        (self.run / "trainer.yaml").write_text(yaml.safe_dump({**defaults, **trainer, "bridge": {"kind": self.bridge}}))


def write_runs(directory: Path) -> list[str]:
    """Write the five runs below `directory`, and return their names."""
    words, small, large = Words(), directory / "models/tiny-llama-2m", directory / "models/Qwen2.5-1.5B-Instruct"
    runs = directory / "runs"

    baseline = RunWriter(runs / NAMES[0], 1, small, words, "arithmetic", 20, 4e-5, age_s=90_000)
    baseline.write(20)
    baseline.note("The reference for all that follows.", "baseline")
    baseline.log("launcher", "INFO    [launcher] Started api (pid 4001, log api.log)")

    higher = RunWriter(runs / NAMES[1], 2, small, words, "arithmetic", 20, 1e-4, pace=4.4, age_s=86_000, kl_coef=0.05)
    higher.write(20)
    higher.note("Learns faster, and falls after step 14: decay the learning rate.", "lr")

    both = RunWriter(
        runs / NAMES[2], 3, small, words, "two_environments", 20, 4e-5, environments=["arithmetic", "countdown"],
        age_s=40_000,
    )  # fmt: skip
    both.write(20)

    died = RunWriter(runs / NAMES[3], 4, small, words, "arithmetic", 200, 4e-5, age_s=20_000)
    died.write(13)
    died.steps = 13
    died.log(
        "launcher",
        "INFO    [launcher] Started vllm (pid 5763, log vllm.log)",
        "ERROR   [launcher] vllm (pid 5763) died: killed by signal KILL: the machine or its control group was out of"
        " memory (oom_kill of /sys/fs/cgroup/memory.events rose).",
    )

    starts = RunWriter(runs / NAMES[4], 5, large, words, "gsm8k_lora", 100, 1e-4, bridge="lora", environments=["gsm8k"])
    starts.note("", "lora", "gsm8k")
    bars = [
        ("vllm", "loading weights 62 %, 21 s of at most 30 min 0 s", 3.62, 8),
        ("trainer", "step 0 of 100, waiting for vLLM 14 s", 0, 100),
    ]
    about = [{"name": name, "note": note, "done": done, "total": total} for name, note, done, total in bars]
    (starts.run / "starting.json").write_text(json.dumps({"bars": about}))
    starts.log("vllm", "INFO    [vllm] Loading safetensors checkpoint shards:  62% Completed")
    mark_running(starts.run)

    words.write(small)
    return [*NAMES]


def _iso(time: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%S+0000")
