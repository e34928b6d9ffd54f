"""`atropos COMMAND`: the one command of Atropos.

Each command is a module with two functions: `parser()`, for `--help` and completion, and `main(argv)`, which returns
the exit status. Only the module of the given command is loaded; it imports heavy packages late.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import FrameType

from atropos_launcher.arguments import Parser, nearest
from atroposlib.errors import one_line_errors
from atroposlib.processes.utf8 import restart_in_utf8


@dataclass(frozen=True)
class Command:
    """Names a module of `commands`, which has `parser` and `main`."""

    name: str
    about: str

    @property
    def module(self) -> str:
        """Its full name."""
        return f"atropos_launcher.commands.{self.name}"


COMMANDS = {
    "train": Command("train", "run a recipe or a run file, changed by flags"),
    "quickstart": Command("quickstart", "train a small model on two CPU cores, in minutes"),
    "status": Command("existing_runs.status", "show running and finished runs"),
    "stop": Command("existing_runs.stop", "end a run and only its own processes"),
    "scale": Command("existing_runs.scale", "give a running run more vLLM servers, or fewer"),
    "logs": Command("existing_runs.logs", "show the logs of a run's services"),
    "view": Command("existing_runs.view", "runs in the browser: curves, every group, every token"),
    "evaluate": Command("evaluate", "measure a model on a recipe's held-out problems"),
    "plot": Command("existing_runs.plot", "plot a run so far, or compare several"),
    "fine-tune": Command("fine_tune", "train on demonstrations or preference pairs alone"),
    "verify": Command("existing_runs.verify", "check that nothing of a repeatable run was changed"),
    "reproduce": Command("reproduce", "repeat a run, or one step, and compare every bit"),
    "env": Command("env", "write a new environment, or run one: serve, process, evaluate"),
    "agent-endpoint": Command("agent_endpoint", "serve agents by OpenAI's and Anthropic's APIs"),
    "doctor": Command("doctor", "check machine, ports and servers before a run"),
    "gpu-check": Command("gpu_check", "run every check that needs a GPU, and print a table"),
    "export": Command("existing_runs.export", "convert a sharded checkpoint to a Hugging Face model"),
    "push": Command("existing_runs.push", "push a trained model to a hub or into a directory"),
    "completion": Command("completion", "print the shell completion of these commands"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status, or exits with it."""
    if argv is None:
        restart_in_utf8()
    words = sys.argv[1:] if argv is None else list(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    with one_line_errors(" ".join(["atropos", *words[:1]]) if words and words[0] in COMMANDS else "atropos"):
        if not words or words[0] in ("-h", "--help"):
            print(overview())
            return 0 if words else 2
        if words[0] == "--version":
            from atroposlib.flags import package_version

            print(f"atropos {package_version()}")
            return 0
        if words[0] not in COMMANDS:
            Parser("", "").error(f"unknown command {words[0]!r}{nearest(words[0], COMMANDS)}")
        status: int = import_module(COMMANDS[words[0]].module).main(words[1:])
        return status


def env() -> int:
    """`atropos-env` is `atropos env`."""
    words = sys.argv[1:]
    return main(words if words == ["--version"] else ["env", *words])


def overview() -> str:
    """List the commands that there are."""
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items())
    return "\n".join(["usage: atropos COMMAND [...]", "", *lines, "", "`atropos COMMAND --help` lists its flags."])


def _end(number: int, frame: FrameType | None) -> None:
    """A signal while no supervisor has taken it over: nothing has to be ended, but somebody should know."""
    with suppress(OSError):  # the terminal is gone
        # past the buffer of stderr, a write to which the signal may have interrupted
        os.write(2, f"atropos: ended by {signal.Signals(number).name}\n".encode())
    raise SystemExit(128 + number)
