"""A child as `verifiers_child.py` speaks, without verifiers. Its taskset's settings say what it does.

One `{"task": N}` is `fate[N]` of those settings: a word below, or an episode's fields. Each start adds a line to the
file `starts`.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any


def node(ids: list[int], role: str, sampled: int = 0, **fields: Any) -> dict[str, Any]:
    mask = [0] * (len(ids) - sampled) + [1] * sampled
    message = {"role": role, "content": f"{role} {ids}"}
    return {"ids": ids, "mask": mask, "logprobs": [-0.25] * sampled, "message": message, "finish": None, **fields}


def trace(number: int, **fields: Any) -> dict[str, Any]:
    nodes = [node([1, 2], "user"), node([3, 10 + number % 10, 11], "assistant", 2, finish="stop")]
    found = {"id": f"t{number}", "agent": "agent", "trainable": True, "reward": float(number % 2), "metrics": {}}
    return {**found, "rewards": {"right": float(number % 2)}, "nodes": nodes, "branches": [[0, 1]], **fields}


def episode(traces: list[Any], **fields: Any) -> dict[str, Any]:
    return {"ok": True, "timed_out": False, "errors": [], "traces": traces, **fields}


def main() -> None:
    settings: dict[str, Any] = {}
    played = 0
    for line in sys.stdin:
        request = json.loads(line)
        number, do = request["id"], request["do"]
        if do == "open":
            settings = request["taskset_arguments"]
            with open(settings["starts"], "a") as starts:
                starts.write(f"{os.getpid()}\n")
            if settings.get("open") == "die":
                print("cannot load", file=sys.stderr)
                sys.exit(3)
            if settings.get("open") == "refuse":
                say({"id": number, "error": {"is_wrong": True, "message": "no such taskset"}})
                continue
            opened = {"verifiers": "0.4.0", "tasks": settings.get("tasks", 8), "environment": "e", "agents": {}}
            say({"id": number, "reply": opened})
        elif do == "play":
            played += 1
            fates = settings.get("fates", ["well"])
            act(number, fates[(played - 1) % len(fates)], played)
        elif do == "ping":
            say({"id": number, "reply": {}})


def act(number: int, fate: Any, played: int) -> None:
    """What happens to one episode."""
    if fate == "die":
        os._exit(7)
    elif fate == "hang":
        time.sleep(3600)
    elif fate == "ignore":
        pass
    elif fate == "garble":
        os.write(1, b"\xff\xfe not json\n")
    elif fate == "scalar":
        os.write(1, b"7\n")
    elif fate == "huge":
        os.write(1, b"x" * (1 << 20))
        os.write(1, b"x" * (1 << 20) + b"\n")
    elif fate == "grandchild":
        with open(os.environ["GRANDCHILD"], "w") as file:
            file.write(str(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid))
        os._exit(7)
    elif fate == "refuse":
        say({"id": number, "error": {"is_wrong": False, "message": "KeyError: 3"}})
    elif isinstance(fate, dict):
        say({"id": number, "reply": episode(**{"traces": [trace(played)], **fate})})
    else:
        say({"id": number, "reply": episode([trace(played)])})


def say(reply: Any) -> None:
    os.write(1, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
