"""Tasks in Harbor's form, run from disk: a machine's own files in bubblewrap take the place of an image.

    TASK/instruction.md   what the agent is told       TASK/tests/test.sh    runs afterwards, and writes the reward
    TASK/task.toml        limits                       TASK/environment/     files that the agent starts with

    agent:  /app is its directory; sees this machine's files but for the tasks', and the network
    tests:  /app as the agent left it, /tests, /logs/verifier; see the system's programs alone, no network, no keys

The tests write `reward.txt`, a number, or `reward.json`, an object with `reward` or with one number. A task that names
an image is refused when it is read: images are neither built nor fetched here.
"""

import json
import math
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atroposlib.agents.program import NAMESPACES, ProgramLimits, Ran, run_program
from atroposlib.child_processes.sandbox import NEW_NAMESPACES, bubblewrap, interpreter_paths
from atroposlib.envs.errors import DataError
from atroposlib.envs.failures import RolloutFailed
from atroposlib.files import read_regular
from atroposlib.wire.folders import digest

WORK, TESTS, LOGS = "/app", "/tests", "/logs/verifier"
SETTINGS, INSTRUCTION, SCRIPT = "task.toml", "instruction.md", "test.sh"
GIVEN = ("environment", "tests")
IMAGES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
DEFAULT_S = 600.0
REWARD_BYTES = 1 << 16
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
OF_ITS_OWN = frozenset({"proc", "dev", "app", "tests", "logs"})  # of the root, which are not this machine's
DEVICES = ("--dev", "/dev", "--proc", "/proc")
AT_HOME = {"HOME": WORK, "TMPDIR": WORK}


@dataclass(frozen=True)
class HarborTask:
    """One task in the directory `root`, which no agent sees. Limits are in seconds; its tests have `variables`."""

    root: Path
    folder: Path
    instruction: str
    agent_s: float = DEFAULT_S
    tests_s: float = DEFAULT_S
    variables: Mapping[str, str] = field(default_factory=dict)

    def start(self, work: Path) -> None:
        """Give the agent's directory the files that it starts with."""
        given = self.folder / "environment"
        if given.is_dir():
            shutil.copytree(given, work, symlinks=True, dirs_exist_ok=True)

    def digests(self) -> dict[str, str]:
        """Return the digest of each file that the agent starts with, or that tests it. Raises OSError."""
        given = [path for name in GIVEN for path in (self.folder / name).rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder)): digest(path) for path in given}

    def around_agent(self, work: Path) -> list[str]:
        """The words before an agent's command, in whose view there is no file of a task."""
        shown = [word for name in sorted(os.listdir("/")) if name not in OF_ITS_OWN for word in _shown(name)]
        hidden = ("--tmpfs", str(self.root), "--remount-ro", str(self.root))
        return [str(bubblewrap()), *NAMESPACES, *shown, *DEVICES, *hidden, *_at_work(work)]

    async def reward(self, work: Path, area: Path, limits: ProgramLimits) -> float:
        """What the tests say of the directory. `area` is a directory for what they write. Raises RolloutFailed where
        they say nothing.
        """
        logs = area / "verifier"
        logs.mkdir()
        command = ["bash", f"{TESTS}/{SCRIPT}"]
        limits = replace(limits, seconds=min(limits.seconds, self.tests_s))
        around = _around_tests(work, self.folder / "tests", logs, limits.folder_bytes)
        ran = await run_program(command, work, {**AT_HOME, **self.variables}, limits, around=around)
        reward = None if ran.broken is not None else _reward_in(logs)
        if reward is None:
            raise RolloutFailed(f"the tests of {self.folder.name} wrote no reward: {_last_words(ran)}", "scorer")
        return reward


def read_harbor_tasks(path: Path) -> list[HarborTask]:
    """The task in this directory, or in each below it. Raises DataError that names a task which cannot run here."""
    folders = [path] if (path / SETTINGS).is_file() else sorted(each.parent for each in path.glob(f"*/{SETTINGS}"))
    if not folders:
        raise DataError(f"{path} has no task: expected TASK/{SETTINGS}, TASK/{INSTRUCTION} and TASK/tests/{SCRIPT}")
    if bubblewrap() is None:
        raise DataError(f"{path} has tasks of Harbor, which need bubblewrap; it cannot make namespaces on this machine")
    return [_task(path.resolve(), folder.resolve()) for folder in folders]


def _task(root: Path, folder: Path) -> HarborTask:
    try:
        settings = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        instruction = (folder / INSTRUCTION).read_text(encoding="utf-8").strip()
        agent, tests, environment = (_table(settings, name) for name in ("agent", "verifier", "environment"))
        task = HarborTask(
            root,
            folder,
            instruction,
            float(agent.get("timeout_sec", DEFAULT_S)),
            float(tests.get("timeout_sec", DEFAULT_S)),
            {str(name): str(value) for name, value in _table(tests, "env").items()},
        )
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: expected {SETTINGS} and {INSTRUCTION} of a Harbor task ({error})") from error
    if not (folder / "tests" / SCRIPT).is_file():
        raise DataError(f"{folder} has no tests/{SCRIPT}, which writes the reward")
    if (image := _image(folder, environment)) is not None:
        raise DataError(
            f"{folder} needs {image}, and images are neither built nor fetched here: leave the task out, or run it by"
            " the harbor taskset of the environment verifiers"
        )
    return task


def _table(settings: Mapping[str, object], name: str) -> Mapping[str, Any]:
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise TypeError(f"{name} is {table!r:.80}: expected a table")
    return table


def _image(folder: Path, environment: Mapping[str, object]) -> str | None:
    if name := environment.get("docker_image"):
        return f"the image {name}"
    found = [name for name in IMAGES if (folder / "environment" / name).exists()]
    return f"the image of environment/{found[0]}" if found else None


def _around_tests(work: Path, tests: Path, logs: Path, most_bytes: int) -> list[str]:
    shown = [word for name in SYSTEM for word in _shown(name)]
    own = [path for path in interpreter_paths() if Path(path).parts[1] not in SYSTEM]
    shown += [word for path in own for word in ("--ro-bind-try", path, path)]
    places = ("--ro-bind", str(tests), TESTS, "--bind", str(logs), LOGS)
    scratch = ("--size", str(most_bytes), "--tmpfs", "/tmp")
    return [str(bubblewrap()), *NEW_NAMESPACES, *scratch, *shown, *DEVICES, *places, *_at_work(work)]


def _shown(name: str) -> Iterator[str]:
    """The words that show an entry of this machine's root, read-only."""
    path = f"/{name}"
    if os.path.islink(path):
        yield from ("--symlink", os.readlink(path), path)
    elif os.path.exists(path):
        yield from ("--ro-bind-try", path, path)


def _at_work(work: Path) -> Sequence[str]:
    return ("--bind", str(work), WORK, "--remount-ro", "/", "--chdir", WORK, "--")


def _reward_in(logs: Path) -> float | None:
    """The number that the tests wrote; None if there is none. What they ran, the agent may have written."""
    try:
        try:
            value: Any = float(read_regular(logs / "reward.txt", REWARD_BYTES))
        except FileNotFoundError:
            said = json.loads(read_regular(logs / "reward.json", REWARD_BYTES), parse_int=float)
            value = said.get("reward", next(iter(said.values())) if len(said) == 1 else None)
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _last_words(ran: Ran) -> str:
    return ran.why() or ran.output.strip()[-200:] or "they said nothing"
