"""What libraries write to stderr by themselves: every line of a service's log begins alike."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_launcher.console.progress import Part, part_of
from atropos_launcher.placement.addresses import BARS
from atroposlib.stderr_lines import BAR_FIRST_S, Bars

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?P<level>[A-Z]+) +\[(?P<process>[^\]]+)\] (?P<text>.*)")
START = "import logging, sys, warnings\nfrom atroposlib.logs import *\n"


def lines_of(program: str) -> list[tuple[str, str]]:
    """Level and text of every line of a process whose log is a pipe; one without the format's prefix fails."""
    done = subprocess.run([sys.executable, "-c", START + program], capture_output=True, timeout=120, check=True)
    found = [LINE.fullmatch(line) for line in done.stderr.decode().split("\n")[:-1]]
    assert all(found), done.stderr
    return [(line["level"], line["text"]) for line in found if line]


@pytest.mark.services
def test_a_warning_is_one_line_and_one_for_developers_is_no_warning() -> None:
    lines = lines_of(
        "configure_logging('trainer')\n"
        "for _ in range(3): warnings.warn('the mask is missing', stacklevel=2)\n"
        "warnings.warn('use b', FutureWarning)\n"
    )
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert re.fullmatch(r"UserWarning: the mask is missing \(.*:\d+\)", lines[0][1])
    assert lines[1][1].startswith("FutureWarning: use b (")


@pytest.mark.services
def test_a_handler_of_a_library_writes_records_whether_it_was_made_before_or_after() -> None:
    lines = lines_of(
        "def handle(name):\n"
        "    log = logging.getLogger(name); log.propagate = False\n"
        "    log.addHandler(logging.StreamHandler())\n"
        "    return log\n"
        "before = handle('before'); configure_logging('trainer'); after = handle('after')\n"
        "before.warning('one'); after.warning('two'); print('three', file=sys.stderr)\n"
        "logging.getLogger('mine').error('four')\n"
    )
    assert lines == [("INFO", "one"), ("INFO", "two"), ("INFO", "three"), ("ERROR", "four")]


@pytest.mark.services
def test_a_progress_bar_leaves_its_end_if_it_is_to_stay() -> None:
    lines = lines_of(
        "configure_logging('env')\n"
        "from tqdm.auto import tqdm\n"
        "for _ in tqdm(range(3), desc='Loading', mininterval=0): pass\n"
        "for _ in tqdm(range(2), desc='outer'):\n"
        "    for _ in tqdm(range(2), desc='inner', leave=False): pass\n"
    )
    assert [text.partition("|")[0] for _, text in lines] == ["Loading: 100%", "outer: 100%"]


@pytest.mark.services
def test_a_download_from_the_hub_has_its_bar_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "configure_logging('env')\n"
        "from huggingface_hub.utils.tqdm import is_tqdm_disabled, tqdm\n"
        "for _ in tqdm(range(3), desc='model.safetensors', disable=is_tqdm_disabled(logging.INFO)): pass\n"
    )
    assert lines_of(program) == []
    monkeypatch.setenv(*BARS)
    ((level, text),) = lines_of(program)
    assert level == "INFO"
    assert part_of(f"2026-11-22 12:30:00 INFO    [env] {text}") == Part("model.safetensors", 100)


@pytest.mark.services
def test_the_log_config_of_vllm_does_so_in_each_of_its_processes() -> None:
    lines = lines_of(
        "import json, logging.config\n"
        "from vllm_patching.log_config import logging_config\n"
        "logging.config.dictConfig(json.loads(json.dumps(logging_config('INFO'))))\n"
        "warnings.warn('torch is old')\n"
        "sys.stderr.write('W1122 torch/_library/triton.py:53] no Triton\\n')\n"
    )
    assert lines[0][1].startswith("UserWarning: torch is old")
    assert lines[1] == ("INFO", "W1122 torch/_library/triton.py:53] no Triton")


@pytest.mark.services
def test_a_failure_of_logging_itself_does_not_go_round_in_circles() -> None:
    program = "configure_logging('a'); logging.getLogger('x').info('%d', 'no number'); get_logger('x').info('after')"
    done = subprocess.run([sys.executable, "-c", START + program], capture_output=True, timeout=120, check=True)
    assert "--- Logging error ---" in done.stderr.decode()
    assert "[a] after\n" in done.stderr.decode()
    assert "RecursionError" not in done.stderr.decode()


@pytest.mark.services
def test_lines_of_two_threads_are_not_mixed() -> None:
    lines = lines_of(
        "import threading, time\n"
        "configure_logging('a')\n"
        "def speak(word):\n"
        "    for _ in range(3):\n"
        "        for letter in word: sys.stderr.write(letter); time.sleep(0.001)\n"
        "        sys.stderr.write('\\n')\n"
        "threads = [threading.Thread(target=speak, args=[word]) for word in ('first', 'second')]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    assert sorted(text for _, text in lines) == ["first"] * 3 + ["second"] * 3


@pytest.mark.services
def test_children_write_to_the_same_file(tmp_path: Path) -> None:
    program = (
        "import subprocess; configure_logging('a'); subprocess.run(['sh', '-c', 'echo raw >&2'], stderr=sys.stderr)"
    )
    with (tmp_path / "log").open("wb") as log:
        subprocess.run([sys.executable, "-c", START + program], stderr=log, timeout=120, check=True)
    assert (tmp_path / "log").read_text() == "raw\n"


@pytest.mark.services
def test_on_a_terminal_all_is_as_it_was() -> None:
    ours, theirs = pty.openpty()
    program = "plain = sys.stderr; configure_logging('a'); sys.exit(0 if sys.stderr is plain else 3)"
    done = subprocess.run([sys.executable, "-c", START + program], stderr=theirs, timeout=120, check=False)
    assert done.returncode == 0
    os.close(ours)
    os.close(theirs)


def test_a_bar_is_told_now_and_then_and_when_it_is_full() -> None:
    clock, told = [0.0], []
    bars = Bars(lambda: clock[0])
    for percent in range(0, 101, 5):
        line = f"Downloading: {percent:>3}%|███  | {percent}/100 [00:{percent:02}<01:00]"
        told += [percent] if bars.are_told(line) else []
        clock[0] += 1.0
    assert told == [5, 30, 55, 80, 100]
    assert not bars.are_told("Downloading: 100%|█████| 100/100 [01:00<00:00]")
    assert not bars.are_told("Generating train split: 7 examples [00:00, 70 examples/s]")
    clock[0] += BAR_FIRST_S
    assert bars.are_told("Generating train split: 70 examples [00:10, 70 examples/s]")


@pytest.mark.parametrize("line", ["", "no bar", "50 % of the memory", "99% done", "a | b", "9" * 100_000])
def test_what_is_no_bar_is_always_told(line: str) -> None:
    bars = Bars(lambda: 0.0)
    assert all(bars.are_told(line) for _ in range(3))
