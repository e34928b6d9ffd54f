"""A child that is forked off the process with torch is, to a test, like one of its own command."""

import os
import subprocess

import pytest

from tests.forked import Forked

pytestmark = [pytest.mark.services, pytest.mark.slow]


def test_words_stdin_variables_and_exit_status_are_its_own() -> None:
    child = Forked("json.tool", ["--indent", "1"], os.environ)
    assert child.communicate('{"a": 1}', timeout=60) == ('{\n "a": 1\n}\n', "")
    assert child.returncode == 0
    child = Forked("timeit", ["-n", "1", "-r", "1", "import os; print(os.environ); os._exit(7)"], {"ONE": "1"})
    assert child.communicate(timeout=60)[0] == "environ({'ONE': '1'})\n"
    assert child.returncode == 7
    child = Forked("json.tool", [], {})
    _, said = child.communicate("no JSON", timeout=60)
    assert (child.returncode, said) == (1, "Expecting value: line 1 column 1 (char 0)\n")


def test_it_is_waited_for_signalled_and_killed() -> None:
    sleeps = ["-n", "1", "-r", "1", "import time; print('awake', flush=True); time.sleep(60)"]
    first, second = (Forked("timeit", sleeps, {}) for _ in range(2))
    assert first.stdout is not None
    assert first.stdout.readline() == "awake\n"
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.05)
    assert (first.poll(), second.poll()) == (None, None)
    first.kill()
    assert (first.wait(10), first.poll()) == (-9, -9)
    second.terminate()
    assert second.wait(10) == -15
    with pytest.raises(ProcessLookupError):
        os.kill(second.pid, 0)
    for child in (first, second):
        child.communicate()
