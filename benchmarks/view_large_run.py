"""How fast the window opens a large run, and how much memory it takes.

    python benchmarks/view_large_run.py --gb 10 --folder /somewhere/with/space

Writes a run directory of about that size: samples.jsonl with groups of 8 answers, trained.jsonl and metrics.jsonl. Then
it starts `atropos view` on it and measures, by HTTP:

    page     until the list of runs, the metrics and the newest 50 groups are there, from the start of the process
    opened   the same without the start of the process: for a run that nobody has opened yet
    group    the newest group with all its tokens
    index    until the index reaches the first row
    search   until a text of the first group is found
    memory   the largest resident memory of the process

The files are removed at the end unless --keep.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from atroposlib.groups import group_id

ROLLOUTS, TOKENS, PROMPT = 8, 500, 60
NEEDLE = "the very first question"
POLL_S = 0.3
IDLE_S = 2.0
ROOT = Path(__file__).resolve().parents[1]


def make_run(folder: Path, gb: float) -> int:
    """Write the run. Returns the number of its groups."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"starts": [{"time": "2027-01-15T08:00:00+0000", "seed": 1}]}))
    random.seed(0)
    templates = [sample(number) for number in range(20)]
    written, groups = 0, 0
    with (
        (folder / "samples.jsonl").open("w") as samples,
        (folder / "trained.jsonl").open("w") as trained,
        (folder / "metrics.jsonl").open("w") as metrics,
    ):
        while written < gb * 1e9:
            step, name = groups // 8 + 1, f"{groups:016x}"
            head = {"step": step - 1, "policy_version": step - 1, "group": name, "env": "math", "dropped": None}
            head |= {"started": 1.8e9 + step, "time": 1.8e9 + step + 0.5}
            question = NEEDLE if groups == 0 else f"question {groups}"
            line = json.dumps(head)[:-1] + templates[groups % 20].replace("QUESTION", question)
            row = {"step": step, "policy_version": step, "group": name, "left_out": None}
            row |= {"advantages": [1.0] * ROLLOUTS, "logprobs": [None] * ROLLOUTS}
            written += samples.write(line) + trained.write(json.dumps(row) + "\n")
            groups += 1
            if groups % 8 == 0:
                metrics.write(json.dumps({"step": step, "reward_mean": 0.5, "time": 1.8e9 + step, "step_s": 1}) + "\n")
    return groups


def sample(seed: int) -> str:
    """The rest of a row of samples.jsonl, which is the same in many rows."""
    tokens = [[random.randrange(150_000) for _ in range(PROMPT + TOKENS)] for _ in range(ROLLOUTS)]
    asked, answer = {"role": "user", "content": "QUESTION"}, " ".join(f"word{seed}" for _ in range(TOKENS))
    row = {
        "reference": str(seed),
        "completion_tokens": [TOKENS] * ROLLOUTS,
        "tokens": tokens,
        "masks": [[-100] * PROMPT + each[PROMPT:] for each in tokens],
        "inference_logprobs": [[1.0] * PROMPT + [-random.random() for _ in range(TOKENS)] for _ in tokens],
        "scores": [float(random.random() < 0.5) for _ in tokens],
        "messages": [[asked, {"role": "assistant", "content": answer}] for _ in tokens],
        "finish_reasons": ["stop"] * ROLLOUTS,
        "unused": group_id(tokens),
    }
    return ", " + json.dumps(row)[1:] + "\n"


@contextmanager
def served(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The window as a process, and its address, which it prints."""
    command = [sys.executable, "-m", "atroposlib.view.serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^#\s]+", process.stdout.readline())
        assert found
        yield psutil.Process(process.pid), found[0]
    finally:
        process.terminate()
        process.wait()


CLIENT = httpx.Client(trust_env=False)


def get(url: str, path: str, **query: object) -> Any:
    reply = CLIENT.get(f"{url}api/runs{path}", params={key: str(value) for key, value in query.items()}, timeout=60)
    reply.raise_for_status()
    return reply.json()


def first_page(url: str, run: str) -> list[dict[str, Any]]:
    """Fetch what a browser asks for when it opens the run and its groups."""
    get(url, "")
    get(url, f"/{run}/metrics")
    found = get(url, f"/{run}/groups", limit=50)["rows"]
    assert len(found) == 50
    return list(found)


def peak(process: psutil.Process) -> float:
    """The largest resident memory so far, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1e3


def measure(folder: Path) -> dict[str, str]:
    """Values with units."""
    run, start = folder.name, time.monotonic()
    with served(folder) as (process, url):
        up = time.monotonic()
        rows = first_page(url, run)
        now = time.monotonic()
        found = {"page": f"{now - start:.2f} s", "opened": f"{now - up:.2f} s"}
        found["memory at first"] = f"{peak(process):.0f} MB"
        start = time.monotonic()
        get(url, f"/{run}/groups/{rows[0]['n']}")
        found["group"] = f"{time.monotonic() - start:.2f} s"
        while not get(url, f"/{run}/groups", limit=1)["complete"]:
            time.sleep(POLL_S)
        found["index"] = f"{time.monotonic() - start:.1f} s"
        start = time.monotonic()
        get(url, f"/{run}/groups", sort="score", signal="yes", offset=1000)
        found["sorted page"] = f"{time.monotonic() - start:.2f} s"
        start = time.monotonic()
        while not (hits := get(url, f"/{run}/groups", q=NEEDLE))["complete"]:
            pass
        assert hits["total"] == 1
        found["search"] = f"{time.monotonic() - start:.1f} s"
        found["memory"] = f"{peak(process):.0f} MB"
        before = process.cpu_times()
        time.sleep(IDLE_S)
        after = process.cpu_times()
        found["processor when idle"] = f"{(after.user + after.system - before.user - before.system) / IDLE_S:.1%}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the run (default: %(default)s)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="make the run here (default: a temporary directory)")
    parser.add_argument("--keep", action="store_true", help="keep the files")
    options = parser.parse_args()
    parent = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        groups = make_run(parent / "large", options.gb)
        size = sum(path.stat().st_size for path in (parent / "large").iterdir())
        print(f"{size / 1e9:.1f} GB, {groups} groups of {ROLLOUTS} answers of {TOKENS} tokens")
        for name, value in measure(parent / "large").items():
            print(f"{name:<20} {value}")
    finally:
        if not options.keep:
            shutil.rmtree(parent)


if __name__ == "__main__":
    main()
