"""How a process ended is said in the same words everywhere."""

import re
import signal
from pathlib import Path

import pytest

from atroposlib.processes.exit_words import exit_words, signal_name
from example_trainer.ranks.place import was_ended_by

ROOT = Path(__file__).parents[3]
WORDS = re.compile(r"exit status \{|killed by \{|exit code \{|ended by \{")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exit status 3"),
        (-9, "killed by signal KILL"),
        (-signal.SIGRTMIN - 1, f"killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_status_in_words(status: int, words: str) -> None:
    assert exit_words(status) == words


def test_a_rank_may_have_been_ended_by_a_signal_without_a_name() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert was_ended_by(signal.SIGRTMIN + 1) == f"was ended by {signal.SIGRTMIN + 1}"
