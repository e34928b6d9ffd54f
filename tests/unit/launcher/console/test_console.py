"""What a person reads of each event."""

import io
import json
import signal
from pathlib import Path
from typing import get_args

import pytest

from atropos_launcher.console.console import PlainConsole, shown_lines
from atropos_launcher.services.event_text import text
from atropos_launcher.services.events import (
    Died,
    Ended,
    Ending,
    Event,
    Interrupted,
    Killed,
    LogLine,
    Lost,
    NotUp,
    Outlived,
    Quiet,
    Restarted,
    Scaled,
    Started,
    StillThere,
    StillWaiting,
    Up,
    Waiting,
)

LOG = Path("runs/a/vllm.log")
URL = "http://127.0.0.1:9001/health"
SENTENCES = {
    Started("vllm", 7, LOG): "Started vllm (pid 7, log runs/a/vllm.log)",
    Waiting("vllm", URL, 1800, LOG): f"Waiting for vllm at {URL}, at most 1800 s (log runs/a/vllm.log)",
    StillWaiting("vllm", URL, 1770.4): f"Still waiting for vllm at {URL}, 1770 s left",
    Up("vllm", 39.6): "vllm is up after 40 s",
    NotUp("vllm", URL, 1800, LOG, ()): f"vllm did not answer at {URL} within 1800 s.",
    Ended("trainer"): "trainer has ended",
    Died("vllm", 7, "exit status 3", LOG, (), None): "vllm (pid 7) died: exit status 3.",
    Lost("view", "exit status 2", LOG): "view died: exit status 2. The run continues without it (log runs/a/vllm.log)",
    Restarted("gsm8k", 8, 1, 3): "Restarted gsm8k (pid 8), restart 1 of 3",
    Outlived(("gsm8k",), 300, LOG, ()): "Still running 300 s after the others ended: gsm8k.",
    LogLine("api", "a\x1bb"): "api a\\x1bb",
    Scaled("vllm-2 serves\x1b the policy"): "vllm-2 serves\\x1b the policy",
    Quiet(45.2, ("3 of 8 groups are there", "environment a\x1b samples")): (
        "No step for 45 s: 3 of 8 groups are there. environment a\\x1b samples"
    ),
    Interrupted(signal.SIGINT): "Interrupted by SIGINT",
    Ending(("api", "vllm"), 7): "Ending api vllm (at most 7 s)",
    Killed(("vllm",), 5): "Killed, still running after 5 s: vllm",
    StillThere(("vllm",)): "Still running after SIGKILL: vllm",
}


@pytest.fixture
def console() -> PlainConsole:
    return PlainConsole(Path("runs/a"), shown_lines(with_bridge=True), out=io.StringIO(), err=io.StringIO())


def written(console: PlainConsole, *events: Event) -> tuple[list[str], str]:
    """Lines on standard output without the time of day, and what is on standard error."""
    for event in events:
        console(event)
    out, err = console._out, console._err
    assert isinstance(out, io.StringIO)
    assert isinstance(err, io.StringIO)
    return [line[len("HH:MM:SS ") :] for line in out.getvalue().splitlines()], err.getvalue()


@pytest.mark.parametrize("event", SENTENCES, ids=lambda event: type(event).__name__)
def test_an_event_is_one_sentence(event: Event) -> None:
    assert text(event) == SENTENCES[event]


def test_every_kind_of_event_has_its_sentence() -> None:
    assert {type(event) for event in SENTENCES} == {*get_args(Event)}


def test_a_death_goes_to_standard_error_with_the_last_lines_of_the_log(console: PlainConsole) -> None:
    out, err = written(console, Died("env", 7, "exit status 3", LOG, ("no such model", "\x1b[31m"), 2.0))
    assert err.splitlines() == [
        "",
        "env (pid 7) died: exit status 3. Last lines of runs/a/vllm.log:",
        "    no such model",
        "    \\x1b[31m",
    ]
    assert out == ["Restarting env in 2 s"]


def test_an_interrupted_run_says_where_its_output_is(console: PlainConsole) -> None:
    assert written(console, Interrupted(signal.SIGTERM))[0][-1] == "Results so far are in runs/a"


@pytest.mark.parametrize(
    ("service", "line", "shown"),
    [
        ("trainer", "11:00:00 INFO [trainer] Step 3/20 | reward 0.5", "trainer Step 3/20 | reward 0.5"),
        ("trainer", "11:00:00 INFO [trainer] Parity: 0.01", "trainer Parity: 0.01"),
        ("trainer", "11:00:00 WARNING [trainer] all scores equal", "trainer WARNING [trainer] all scores equal"),
        ("mine", "INFO Held-out accuracy 96.9 %", "mine Held-out accuracy 96.9 %"),
        ("vllm", "INFO:     Uvicorn running on 127.0.0.1", "vllm Uvicorn running on 127.0.0.1"),
        ("vllm", "WARNING 11-22 eager mode", None),
        ("vllm-2", "INFO:     Uvicorn running on 127.0.0.1", "vllm-2 Uvicorn running on 127.0.0.1"),
        ("vllm-2", "WARNING 11-22 eager mode", None),
        ("api", "INFO Batch 9 sent", None),
    ],
)
def test_the_lines_that_tell_how_it_goes_are_shown(
    console: PlainConsole, service: str, line: str, shown: str | None
) -> None:
    assert written(console, LogLine(service, line))[0] == ([shown] if shown else [])


def test_without_the_bridge_only_learning_is_shown() -> None:
    console = PlainConsole(Path("runs/a"), shown_lines(with_bridge=False), out=io.StringIO(), err=io.StringIO())
    lines = [LogLine("trainer", "INFO Parity: 0.01"), LogLine("trainer", "INFO Step 1/2")]
    assert written(console, *lines)[0] == ["trainer Step 1/2"]


def test_vllm_warns_of_the_run_once_it_is_up(console: PlainConsole) -> None:
    warning = LogLine("vllm", "(APIServer pid=7) WARNING 11-22 12:00:00 the KV cache is full")
    old = LogLine("vllm", "(APIServer pid=7) WARNING 11-22 12:00:00 raw prompts are deprecated")
    shown = written(console, warning, Up("vllm", 39.6), warning, old, Died("vllm", 7, "exit status 1", LOG, (), 2.0))
    assert shown[0][:2] == ["vllm is up after 40 s", "vllm WARNING 11-22 12:00:00 the KV cache is full"]
    assert written(console, LogLine("vllm", "WARNING eager mode"))[0] == shown[0]


def test_trouble_that_repeats_is_shown_once_and_counted_at_the_end(console: PlainConsole) -> None:
    trouble = [LogLine("trainer", f"WARNING [trainer] group {number} is dropped") for number in range(4)]
    assert written(console, *trouble, Ending(("api",), 7))[0] == [
        "trainer WARNING [trainer] group 0 is dropped",
        "trainer WARNING [trainer] group 3 is dropped (earlier, with 2 more like it before)",
        "Ending api (at most 7 s)",
    ]


def test_a_sample_is_shown_at_the_first_step_and_every_fifth(tmp_path: Path) -> None:
    sample = {"scores": [1.0], "messages": [[{"role": "assistant", "content": "36"}]]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    console = PlainConsole(tmp_path, shown_lines(with_bridge=False), out=io.StringIO(), err=io.StringIO())
    lines = written(console, *(LogLine("trainer", f"Step {step}/6 | reward 1") for step in range(1, 7)))[0]
    answer = ["Sample: reward 1.00, mean of its 1 answers 1.00", "    < 36"]
    steps = [f"trainer Step {step}/6 | reward 1" for step in range(1, 7)]
    assert lines == [steps[0], *answer, *steps[1:5], *answer, steps[5]]
