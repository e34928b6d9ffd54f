"""Prints, for each task of reasoning-gym on the command line, four known answers and the scorer's own scores of texts.

Entries of some tasks depend on the hash seed of strings: run it with PYTHONHASHSEED=0, as `ChildPool` runs children.
"""

import json
import sys

import reasoning_gym

texts = json.loads(sys.stdin.read())
found = {}
for task in sys.argv[1:]:
    entries = reasoning_gym.create_dataset(task, size=4, seed=0)
    scores = {text: entries.score_answer(answer=text, entry=entries[0]) for text in texts}
    found[task] = {"known": [entry["answer"] for entry in entries], "scores": scores}
print("\n" + json.dumps(found))
