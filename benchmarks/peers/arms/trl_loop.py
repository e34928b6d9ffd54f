"""TRL: GRPOTrainer with its own generation on the quickstart's task, until an evaluation has reached GOAL.

    python -m benchmarks.peers.arms.trl_loop WORK GOAL SEED STEPS SETTINGS       in an environment with TRL

STEPS are the most that it makes. WORK has the model and problems.json: the quickstart's questions. SETTINGS, as JSON,
go over those below, which are the quickstart's as far as TRL has them.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trainer_step import answer

GROUP, GROUPS, ANSWER_TOKENS = 8, 8, 24
EVALUATED_EVERY = 5
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def is_right(text: str, result: str) -> bool:
    """Compare the last number with the known one."""
    numbers = NUMBER.findall(text.replace(",", ""))
    return bool(numbers) and numbers[-1] == result


def reward(completions: list[Any], result: list[str], **_: object) -> list[float]:
    """1 for the right last number."""
    return [float(is_right(each[0]["content"], known)) for each, known in zip(completions, result, strict=True)]


class Evaluations(TrainerCallback):
    """Greedy answers to the held-out questions before training and every five steps; ends training at the goal."""

    def __init__(self, tokenizer: Any, problems: list[dict[str, str]], goal: float, start: float) -> None:
        self._tokenizer, self._goal, self._start = tokenizer, goal, start
        self._results = [problem["result"] for problem in problems]
        chats = [[{"role": "user", "content": problem["question"]}] for problem in problems]
        self._inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        self.best = 0.0
        self.metrics: dict[str, float] = {}

    def on_train_begin(self, args: object, state: object, control: object, **given: object) -> None:
        self._look(given["model"], state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % EVALUATED_EVERY == 0:
            self._look(given["model"], state, control)

    def _look(self, model: Any, state: Any, control: Any) -> None:
        accuracy = self._accuracy(model)
        print(f"step {state.global_step}: {accuracy:.1%} after {time.perf_counter() - self._start:.0f} s", flush=True)
        self.best = max(self.best, accuracy)
        if accuracy >= self._goal:
            self.metrics = {"seconds_to_goal": time.perf_counter() - self._start, "steps": state.global_step}
            control.should_training_stop = True

    def _accuracy(self, model: Any) -> float:
        model.eval()
        with torch.inference_mode():
            ids = model.generate(**self._inputs, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        model.train()
        behind = self._inputs["input_ids"].shape[1]
        texts = self._tokenizer.batch_decode(ids[:, behind:], skip_special_tokens=True)
        return sum(map(is_right, texts, self._results)) / len(texts)


def main(work: Path, goal: float, seed: int, steps: int, settings: dict[str, Any]) -> None:
    """Train until the goal or the last step."""
    start = time.perf_counter()
    problems = json.loads((work / "problems.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(work / "model", padding_side="left")
    evaluations = Evaluations(tokenizer, problems["held_out"], goal, start)
    asked = [
        {"prompt": [{"role": "user", "content": each["question"]}], "result": each["result"]}
        for each in problems["train"]
    ]
    given: dict[str, Any] = {
        "num_generations": GROUP,
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": GROUPS,
        "max_completion_length": ANSWER_TOKENS,
        "learning_rate": 4e-5,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_steps": steps,
    }
    args = GRPOConfig(
        output_dir=str(work / f"trl-{seed}"),
        seed=seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        use_cpu=True,
        **(given | settings),
    )
    GRPOTrainer(
        model=str(work / "model"),
        reward_funcs=[reward],
        args=args,
        train_dataset=Dataset.from_list(asked),
        processing_class=tokenizer,
        callbacks=[evaluations],
    ).train()
    answer(accuracy=100 * evaluations.best, **evaluations.metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))
