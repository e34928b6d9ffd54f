"""The console on a real pseudo-terminal: what is drawn, what stays, and that the terminal is as it was."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from atropos_launcher.console.live_console import Advance, QueuedGroups, drawn, one_bar
from atropos_launcher.console.progress import Bar
from tests.serving import Asked, Reply, ThreadedServer

PROGRAM = Path(__file__).parents[1] / "live_run.py"
SEQUENCE = re.compile(r"\x1b\[(?P<parameters>[0-9;?]*)(?P<final>[A-Za-z])")
NARROW = 30
SAMPLE = {"scores": [1.0], "messages": [[{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]]}
LASTING = [
    "Training begins",
    "vllm is up after 40 s",
    "vllm WARNING 11-22 the cache is \\x1b[2Jfull",
    "gsm8k WARNING [gsm8k] answer 0 cannot be graded",
    "trainer Step 1/3",
    "Sample: reward 1.00",
    "    > 1 + 1?",
    "    < 2",
    "trainer Step 2/3",
    "trainer Step 3/3",
]


def read(ours: int) -> str:
    """What was written on the other side; nothing once that is closed."""
    try:
        return os.read(ours, 65536).decode(errors="replace")
    except OSError:
        return ""


class Seen:
    """What a run on a terminal of `rows` by `columns` wrote, and how it ended."""

    def __init__(self, run_dir: Path, how: str, rows: int = 24, columns: int = 80, **variables: str) -> None:
        run_dir.mkdir(exist_ok=True)
        (run_dir / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(ours)
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.columns = columns
        with subprocess.Popen(
            [sys.executable, str(PROGRAM), str(run_dir), how],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": "xterm-256color", **variables},
            start_new_session=True,
        ) as process:
            os.close(theirs)
            self.raw = self.wide = ""  # all, and what was written before the terminal was made narrow
            while chunk := read(ours):
                self.raw += chunk
                if "READY" in self.raw:
                    process.send_signal(signal.SIGKILL)
                if "NARROWER?" in self.raw and not self.wide:
                    self.wide = self.raw
                    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, NARROW, 0, 0))
                    os.write(ours, b"\n")
        self.status = process.returncode
        self.after = termios.tcgetattr(ours)
        os.close(ours)

    def sequences(self) -> set[str]:
        """What was said to the terminal, without colours."""
        return {found[0] for found in SEQUENCE.finditer(self.raw) if found["final"] != "m"}

    def screen(self) -> list[str]:
        """The lines that are left, as a terminal with an endless scrollback has them. Knows what rich writes."""
        lines, row, column, position = [""], 0, 0, 0
        while position < len(self.raw):
            if found := SEQUENCE.match(self.raw, position):
                position = found.end()
                if found["final"] == "A":
                    row -= int(found["parameters"] or 1)
                    assert row >= 0
                elif found["final"] == "K":
                    lines[row] = ""
                continue
            letter, position = self.raw[position], position + 1
            if letter == "\r":
                column = 0
            elif letter == "\n":
                row += 1
            else:
                if column == self.columns:
                    row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
                lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
                column += 1
            lines += [""] * (row + 1 - len(lines))
        return [line.rstrip() for line in lines]

    def text(self) -> str:
        """The lines without the time of day; those that the terminal wrapped are whole again."""
        joined = ""
        for line in self.screen():
            joined += line if len(line) == self.columns else line + "\n"
        return re.sub(r"^\d\d:\d\d:\d\d ", "", joined, flags=re.MULTILINE)


def assert_nothing_lost(seen: Seen) -> None:
    position = 0
    text = seen.text()
    for line in LASTING:
        assert line in text[position:], (line, text)
        position = text.index(line, position)
    assert "━" not in text  # the bars are gone


def widest_bar(raw: str) -> int:
    """The length of the longest line with a bar in it."""
    return max(len(line) for line in re.split(r"[\r\n]", SEQUENCE.sub("", raw)) if "━" in line)


@pytest.mark.services
@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (24, 200), (3, 20), (1, 7)])
def test_every_line_stays_and_no_bar_does(tmp_path: Path, rows: int, columns: int) -> None:
    seen = Seen(tmp_path / "run", "ends", rows, columns)
    if columns >= 80:
        assert_nothing_lost(seen)
        assert "loading weights" in seen.raw
        assert "step 2 of 3, about" in seen.raw
    wide = re.sub(r"\s", "", seen.text())
    assert all(re.sub(r"\s", "", line) in wide for line in LASTING)
    assert seen.screen()[-2:] == ["The summary", ""] or columns < 11
    assert seen.status == 0


@pytest.mark.rotating
@pytest.mark.services
@pytest.mark.parametrize(
    ("how", "status", "last"),
    [
        ("ends", 0, "The summary"),
        ("dies", 0, "The summary"),
        ("interrupted", 0, "The summary"),
        ("raises", 1, "RuntimeError: a defect"),
    ],
)
def test_the_terminal_is_given_back(tmp_path: Path, how: str, status: int, last: str) -> None:
    seen = Seen(tmp_path / "run", how)
    assert_nothing_lost(seen)
    assert seen.screen()[-2:] == [last, ""]
    assert seen.status == status
    assert seen.after == seen.before
    assert seen.sequences() <= {"\x1b[2K", "\x1b[1A"}  # nothing that would have to be undone
    assert seen.raw.rindex("\x1b[0m") > seen.raw.rindex("\x1b[33m")  # no colour is left on
    if how == "dies":
        assert "vllm (pid 8) died: killed by signal KILL. Last lines of" in seen.text()
        assert "    the last \\x1b[31mline\n" in seen.text()


@pytest.mark.services
def test_a_terminal_that_is_made_narrower_gets_narrower_bars(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "run", "shrinks", columns=100)
    assert seen.status == 0
    assert seen.wide
    assert widest_bar(seen.wide.partition("NARROWER?")[0]) == 99
    assert widest_bar(seen.raw.removeprefix(seen.wide)) == NARROW - 1
    for line in LASTING:
        assert line in SEQUENCE.sub("", seen.raw)


@pytest.mark.services
def test_a_killed_launcher_leaves_a_visible_cursor(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "run", "waits")
    assert seen.status == -signal.SIGKILL
    assert seen.after == seen.before
    assert seen.sequences() <= {"\x1b[2K", "\x1b[1A"}
    assert "Training begins" in seen.text()


@pytest.mark.services
def test_lines_that_are_alike_are_told_at_the_end(tmp_path: Path) -> None:
    text = Seen(tmp_path / "run", "ends").text()
    assert text.count("cannot be graded") == 2
    assert "gsm8k WARNING [gsm8k] answer 2 cannot be graded (earlier, with 1 more like it before)" in text


@pytest.mark.services
def test_no_color_is_no_color(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "run", "ends", NO_COLOR="1")
    assert_nothing_lost(seen)
    assert not re.search(r"\x1b\[[0-9;]*m", seen.raw)
    assert "━" in seen.raw


@pytest.mark.rotating
@pytest.mark.services
@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, term: str) -> None:
    seen = Seen(tmp_path / "run", "ends", TERM=term)
    assert_nothing_lost(seen)
    assert "\x1b" not in seen.raw
    assert "\r" not in seen.raw.replace("\r\n", "\n")  # the terminal's own


@pytest.mark.services
def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    done = subprocess.run([sys.executable, str(PROGRAM), str(run_dir), "ends"], capture_output=True, check=True)
    assert not re.search(rb"[\r\x1b]", done.stdout)
    assert b"trainer Step 3/3" in done.stdout


@pytest.mark.parametrize("width", [1, 7, 19, 20, 80, 300])
def test_a_bar_is_one_line_narrower_than_the_terminal(width: int) -> None:
    from rich.console import Console

    console = Console(width=width, height=10, color_system=None, force_terminal=True)
    bars = [Bar("a very long name", 3, 8, "note " * 40), Bar("b", None, None, "\u4e2d" * 90)]
    with console.capture() as captured:
        console.print(drawn(bars, width))
    lines = captured.get().splitlines()
    assert len(lines) == 2
    assert all(len(line) < max(2, width) for line in lines)


def test_a_bar_of_its_own_is_gone_when_it_is_done() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as out, one_bar("model", "tensors unpacked", out) as advance:
        assert isinstance(advance, Advance)
        for done in range(1, 4):
            advance(done, 3)
    raw = ""
    while chunk := read(ours):
        raw += chunk
    os.close(ours)
    assert "tensors unpacked: 3 of 3" in raw
    assert raw.endswith("\x1b[2K")


def test_waiting_groups_are_asked_of_the_api() -> None:
    def answer(asked: Asked) -> Reply:
        allowed = asked.path == "/status" and asked.headers["Authorization"] == "Bearer secret"
        return Reply(body=b'{"current_step": 1, "queue_size": 5}') if allowed else Reply(401, b"no")

    with ThreadedServer(answer) as server:
        assert QueuedGroups(server.url, "secret")() == 5
        assert QueuedGroups(server.url)() is None
    assert QueuedGroups(server.url)() is None
