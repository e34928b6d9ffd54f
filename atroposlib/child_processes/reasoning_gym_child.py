"""The process that makes and scores the tasks of reasoning-gym; see `loop.py` for its protocol and limits.

    {"tasks": true}                                                  ──▶  {"tasks": ["ab", "acre", ...]}
    {"task": "ab", "options": {}, "seed": 0, "index": 7}             ──▶  {"question": "...", "answer": "..."}
    {"task": "ab", "options": {}, "seed": 0, "index": 7, "answer": "A# B"}  ──▶  {"score": 0.01, "rejected": null}

An entry is made again for every request from task, options, seed and index, so that any process can score what
another one asked. Some scorers evaluate the answer, which is why this process can be killed and has no rights.
`evaluated_answers.py` limits them to the task's mathematics; "rejected" names anything else in an answer.

The scorers of countdown and puzzle24 look for the numbers in the text of the answer, where `0x18`, `2_4` and a comment
deceive them, and puzzle24's accepts any four numbers. An answer that they accept is therefore computed once more.
"""

import functools
import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from atroposlib.child_processes.evaluated_answers import EVALUATED, Guard
from atroposlib.child_processes.loop import answer_requests
from atroposlib.grading.arithmetic import ExpressionError, compute

# Some tasks make all their entries at once, so each source holds few; the next source has the next entries.
CHUNK = 100
SEEDS_APART = 10_000_000
# Put together from other tasks, which is what the environment does itself.
NOT_TASKS = {"composite"}

guard = Guard()
guard.install(DATASETS[task][0].__module__ for task in EVALUATED)


def false_solution(task: str, answer: str, metadata: dict[str, Any]) -> str | None:
    """Return the reason why `answer` does not solve a puzzle of numbers; None if it does, and for other tasks."""
    if task not in ("countdown", "puzzle24"):
        return None
    try:
        computed = compute(answer)
    except ExpressionError as error:
        return f"it is not arithmetic: {error}"
    if sorted(computed.numbers) != sorted(metadata["numbers"]):
        return "its numbers are not those of the puzzle"
    return None if computed.value == metadata.get("target", 24) else "its value is not the target"


@functools.lru_cache(maxsize=512)
def source(task: str, options: str, seed: int, chunk: int) -> Any:
    """A chunk of the entries of one task; `options` is JSON. reasoning-gym makes entry i from seed + i."""
    return reasoning_gym.create_dataset(
        task, **{"size": CHUNK, "seed": seed * SEEDS_APART + chunk * CHUNK, **json.loads(options)}
    )


def answer(request: dict[str, Any]) -> dict[str, object]:
    """The reply, or what went wrong: {"error": ...}."""
    try:
        if "tasks" in request:
            return {"tasks": sorted(DATASETS.keys() - NOT_TASKS)}
        chunk, place = divmod(request["index"], CHUNK)
        entries = source(request["task"], json.dumps(request["options"]), request["seed"], chunk)
        entry = entries[place]
        if "answer" not in request:
            known = entry.get("answer")
            return {"question": entry["question"], "answer": None if known is None else str(known)}
        given = request["answer"].strip()
        with guard.scoring(request["task"], given, entry["answer"]):
            score = float(entries.score_answer(answer=given, entry=entry))
        rejected = guard.rejected
        if score == 1.0:
            rejected = rejected or false_solution(request["task"], given, entry["metadata"])
        return {"score": 0.0 if rejected else score, "rejected": rejected}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


if __name__ == "__main__":
    answer_requests(answer)
