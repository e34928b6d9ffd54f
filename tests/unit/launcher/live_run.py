"""A run as the live console sees it, for test_live_console.py to start on a terminal of its own.

`python live_run.py RUN_DIR HOW`, where HOW is `ends`, `dies`, `raises`, `interrupted`, `waits` (until it is killed) or
`shrinks` (it waits to be told that its terminal is narrower now).
"""

import fcntl
import signal
import sys
import termios
import time
from pathlib import Path

from atropos_launcher.console.console import PlainConsole, is_terminal, shown_lines
from atropos_launcher.console.live_console import LiveConsole
from atropos_launcher.console.progress import RunProgress
from atropos_launcher.services.events import Died, Ended, Ending, Interrupted, LogLine, Started, Up, Waiting

PAUSE_S = 0.3  # longer than the time between two drawings


def make_console(run_dir: Path) -> PlainConsole:
    if is_terminal(sys.stdout):
        return LiveConsole(run_dir, True, RunProgress(3, 8))
    return PlainConsole(run_dir, shown_lines(with_bridge=True))


def main(run_dir: Path, how: str) -> None:
    log = run_dir / "vllm.log"
    with make_console(run_dir) as console:
        console.say("Training begins")
        console(Started("trainer", 7, log))
        console(Waiting("vllm", "http://127.0.0.1:9001/health", 1800, log))
        console(LogLine("vllm", "Starting to load model /m..."))
        time.sleep(PAUSE_S)
        if how == "waits":
            print("READY", file=sys.stderr)
            time.sleep(60)
        if how == "shrinks":
            print("NARROWER?", file=sys.stderr)
            sys.stdin.readline()
            time.sleep(PAUSE_S)
        console(Up("vllm", 39.6))
        console(LogLine("vllm", "WARNING 11-22 the cache is \x1b[2Jfull"))
        for number in range(3):
            console(LogLine("gsm8k", f"WARNING [gsm8k] answer {number} cannot be graded"))
        for step in range(1, 4):
            time.sleep(PAUSE_S)
            console(LogLine("trainer", f"Step {step}/3 | reward 0.5 | step 0.3 s " + 50 * "wide "))
        match how:
            case "dies":
                console(Died("vllm", 8, "killed by signal KILL", log, ("the last \x1b[31mline",), None))
            case "raises":
                raise RuntimeError("a defect")
            case "interrupted":
                console(Interrupted(signal.SIGINT))
            case _:
                console(Ended("trainer"))
        console(Ending(("api", "vllm"), 7))
        time.sleep(PAUSE_S)
    print("The summary")


if __name__ == "__main__":
    if sys.stdin.isatty():
        fcntl.ioctl(sys.stdin, termios.TIOCSCTTY, 0)  # in the foreground, as a shell starts programs
    main(Path(sys.argv[1]), sys.argv[2])
