"""Prints the tasks of reasoning-gym whose scorer evaluates an answer: a number in it turns up in code that is run."""

import json
import resource
import sys
from types import CodeType
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

NUMBER = 7919
ANSWERS = (
    "{n}",
    "[{n}]",
    "[[{n}]]",
    '{{"a": {n}}}',
    "({n}, 1)",
    "{n} + 1",
    "{n} * x",
    "'{n}'",
    "{n}/1",
    "x = {n}",
    "0x{n}",
    "{n}\n{n}",
    "A={n},B=1",
)
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
evaluated: set[str] = set()
task = ""


def holds_number(value: Any) -> bool:
    if isinstance(value, CodeType):
        return any(holds_number(constant) for constant in value.co_consts)
    if isinstance(value, tuple | frozenset):
        return any(holds_number(part) for part in value)
    return str(value).endswith(str(NUMBER))


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if task and event == "exec" and holds_number(arguments[0]):
        evaluated.add(task)


sys.addaudithook(note)
for name in sorted(DATASETS.keys() - {"composite"}):
    entries = reasoning_gym.create_dataset(name, size=1, seed=1)
    entry = entries[0]
    for answer in ANSWERS:
        task = name
        try:
            entries.score_answer(answer=answer.format(n=NUMBER), entry=entry)
        except Exception as error:
            print(name, answer, repr(error)[:80], file=sys.stderr)
        task = ""
print("\n" + json.dumps(sorted(evaluated)))
