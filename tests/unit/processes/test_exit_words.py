"""How a process ended is said in the same words everywhere."""

import re
import signal
from pathlib import Path

import pytest

from atroposlib.processes.exit_words import exit_words, signal_name
from example_trainer.ranks.place import was_ended_by

ROOT = Path(__file__).parents[3]
OWNER = ROOT / "atroposlib/processes/exit_words.py"
PACKAGES = ("atropos_launcher", "atroposlib", "environments", "example_trainer", "vllm_patching")
WORDS = re.compile(r"(exit status|exit code|killed by|killed by signal) \{")


def test_no_other_module_has_words_of_its_own() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [path for path in files if WORDS.search(path.read_text())] == [OWNER]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exit status 3"),
        (-9, "killed by signal KILL"),
        (-signal.SIGRTMIN - 1, "killed by signal 35"),
    ],
)
def test_status_in_words(status: int, words: str) -> None:
    assert exit_words(status) == words


def test_a_rank_may_have_been_ended_by_a_signal_without_a_name() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert was_ended_by(signal.SIGRTMIN + 1) == f"was ended by {signal.SIGRTMIN + 1}"
