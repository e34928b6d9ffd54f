"""How far a run is, by what its services write."""

import signal
from collections import deque
from pathlib import Path

import pytest

from atropos_launcher.console.progress import (
    VLLM_STAGES,
    Bar,
    Part,
    RunProgress,
    duration,
    groups_bar,
    part_of,
    seconds_left,
    vllm_stage,
)
from atropos_launcher.services.events import Died, Event, Interrupted, LogLine, Started, Up, Waiting

LOG = Path("runs/a/vllm.log")
HEALTH = "http://127.0.0.1:9001/health"
STEP_1 = "Step 1/4 | reward 0.141 | stall 15 ms | step 46.4 s (sampling 26.7, training 18.3)"
VLLM_LOG = {
    '[vLLM Patch] weight bridge on: {"config_path": "a.json"}': "starting",
    "(APIServer pid=1) INFO 11-22 12:06:27 [model.py:733] Resolved architecture: LlamaForCausalLM": (
        "reading the model's configuration"
    ),
    "(EngineCore pid=2) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config": "starting the engine",
    "(Worker pid=3) INFO [cpu_model_runner.py:68] Starting to load model /m...": "loading weights",
    "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00,  2.74it/s]": "loading weights",
    "(EngineCore pid=2) INFO [backends.py:1167] Dynamo bytecode transform time: 3.11 s": "compiling",
    "(EngineCore pid=2) INFO [kv_cache_utils.py:2327] CPU KV cache size: 23,296 tokens": "reserving the KV cache",
    "(Worker pid=3) INFO [gpu_worker.py:760] Available KV cache memory: 99.1 GiB": "reserving the KV cache",
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|#2 | 8/67": "warming up",
    "(EngineCore pid=2) INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 1.41 s": (
        "opening its port"
    ),
    'INFO:     127.0.0.1:4 - "GET /health HTTP/1.1" 200 OK': "starting",
}


def after(*events: Event | tuple[float, Event], steps: int = 4, groups: int | None = 8) -> RunProgress:
    """A run with these events; those without a time were at 0."""
    run = RunProgress(steps, groups)
    for each in events:
        now, event = each if isinstance(each, tuple) else (0.0, each)
        run.see(event, now)
    return run


def bar(run: RunProgress, name: str, now: float = 0.0) -> Bar | None:
    return next((each for each in run.bars(now) if each.name == name), None)


@pytest.mark.parametrize(("line", "stage"), VLLM_LOG.items(), ids=VLLM_LOG.values())
def test_a_line_of_vllms_log_tells_its_stage(line: str, stage: str) -> None:
    assert VLLM_STAGES[vllm_stage(line)][0] == stage


def test_vllm_start_is_shown_by_stage_and_never_goes_back() -> None:
    lines = [LogLine("vllm", line) for line in VLLM_LOG]
    run = after(Waiting("vllm", HEALTH, 1800, LOG), *lines[:5])
    shown = bar(run, "vllm", now=75.0)
    assert shown == Bar("vllm", 3.5, 8, "loading weights 50 %, 1 min 15 s of at most 30 min 0 s")
    run.see(lines[0], 80.0)
    assert (bar(run, "vllm", 80.0) or shown).note.startswith("loading weights, ")


def test_each_of_several_servers_has_its_stage() -> None:
    waiting = [Waiting(f"vllm-{number}", HEALTH, 1800, LOG) for number in (1, 2)]
    run = after(
        *waiting, LogLine("vllm-2", "(Worker pid=3) INFO [cpu_model_runner.py:68] Starting to load model /m...")
    )
    assert (bar(run, "vllm-1") or Bar("", 0, 0, "")).note.startswith("starting, ")
    assert (bar(run, "vllm-2") or Bar("", 0, 0, "")).note.startswith("loading weights, ")


@pytest.mark.parametrize("event", [Up("vllm", 39.0), Died("vllm", 7, "exit status 1", LOG, (), None)])
def test_a_service_that_is_up_or_dead_is_awaited_no_more(event: Event) -> None:
    assert bar(after(Waiting("vllm", HEALTH, 1800, LOG), event), "vllm") is None


def test_a_download_is_shown_until_it_is_complete() -> None:
    run = after(LogLine("gsm8k", "train.parquet:  40%|####      | 108M/269M [00:01<00:02]"))
    assert bar(run, "gsm8k") == Bar("gsm8k", 40, 100, "train.parquet 40 %")
    run.see(LogLine("gsm8k", "train.parquet: 100%|##########| 269M/269M"), 1.0)
    assert bar(run, "gsm8k") is None


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("Fetching 3 files:  33%|###", Part("Fetching 3 files", 33)),
        ("\x1b[31mevil: 33%|", Part("\\x1b[31mevil", 33)),
        ("Held-out accuracy 32.8 % (21/64)", None),
        ("weird: 900%|", None),
    ],
)
def test_only_a_progress_bar_is_a_part(line: str, part: Part | None) -> None:
    assert part_of(line) == part


def test_steps_have_an_estimate_from_the_first_one_on() -> None:
    run = after(Started("trainer", 7, LOG), (5.0, LogLine("trainer", "INFO Waiting for a batch from http://a")))
    assert bar(run, "trainer", 17.0) == Bar("trainer", 0, 4, "step 0 of 4, waiting for samples 12 s")
    run.see(LogLine("trainer", STEP_1), 60.0)
    assert bar(run, "trainer", 60.0) == Bar("trainer", 1, 4, "step 1 of 4, about 2 min 19 s left")
    run.see(LogLine("trainer", STEP_1.replace("1/4", "2/4")), 80.0)
    assert (bar(run, "trainer", 90.0) or Bar("", 0, 0, "")).note == "step 2 of 4, about 56 s left"


def test_what_is_left_falls_while_a_step_takes_its_time() -> None:
    assert seconds_left(2, deque([10.0]), 4.0) == 16.0
    assert seconds_left(2, deque([10.0]), 99.0) == 10.0
    assert seconds_left(1, deque([10.0]), 99.0) is None
    assert seconds_left(0, deque([10.0]), 0.0) is None
    assert seconds_left(2, deque(), 0.0) is None


def test_groups_are_counted_for_the_next_batch() -> None:
    run = after()
    assert bar(run, "sampling") is None
    run.queued = 5
    assert bar(run, "sampling") == Bar("sampling", 5, 8, "5 of 8 groups for batch 1")
    run.see(LogLine("api", "INFO Batch 1 sent (8 groups, lease 60 s)"), 1.0)
    assert bar(run, "sampling") == Bar("sampling", 0, 8, "0 of 8 groups for batch 2")


def test_no_groups_are_awaited_before_vllm_is_up_or_after_the_last_batch() -> None:
    run = after(Waiting("vllm", HEALTH, 1800, LOG), steps=1)
    run.queued = 0
    assert bar(run, "sampling") is None
    run.see(Up("vllm", 39.0), 39.0)
    assert bar(run, "sampling") is not None
    run.see(LogLine("api", "INFO Batch 1 sent (8 groups, lease 60 s)"), 40.0)
    assert bar(run, "sampling") is None


def test_more_groups_than_a_batch_takes_or_of_different_sizes_are_told_as_such() -> None:
    assert groups_bar(11, 8, 3).note == "8 of 8 groups for batch 3 (3 more wait)"
    assert groups_bar(11, None, 3) == Bar("sampling", None, None, "11 groups for batch 3")


def test_an_evaluation_is_counted_or_compared_with_the_last_one() -> None:
    run = after(LogLine("gsm8k", "INFO Evaluating policy version 0"))
    assert bar(run, "gsm8k", 3.0) == Bar("gsm8k", None, None, "evaluating policy 0, 3 s")
    run.see(LogLine("gsm8k", "INFO Evaluated 32 of 64"), 6.0)
    assert bar(run, "gsm8k", 6.0) == Bar("gsm8k", 32, 64, "evaluating policy 0: 32 of 64 answers")
    run.see(LogLine("gsm8k", "INFO Held-out accuracy 9.4 % (6/64) at policy version 0"), 12.0)
    assert bar(run, "gsm8k", 12.0) is None
    run.see(LogLine("gsm8k", "INFO Evaluating policy version 5"), 100.0)
    assert bar(run, "gsm8k", 103.0) == Bar("gsm8k", 3.0, 12.0, "evaluating policy 5, 3 s (the last took 12 s)")


def test_a_failed_evaluation_is_over() -> None:
    run = after(LogLine("gsm8k", "INFO Evaluating policy version 0"))
    run.see(LogLine("gsm8k", "ERROR The evaluation of policy version 0 failed (try 1 of 3)"), 1.0)
    assert bar(run, "gsm8k") is None


@pytest.mark.parametrize("service", ["env", "api", "trainer"])
@pytest.mark.parametrize(
    "text",
    [
        "Evaluating policy version {}",
        "Evaluated {} of {}",
        "Batch {} sent",
        "Step {}/{} | step {} s",
        "Step 1/3 | step 1.2.3 s",
    ],
)
def test_no_line_of_a_log_ends_the_launcher(service: str, text: str) -> None:
    """An environment may print what a model wrote, and Python reads no integer of 5,000 digits."""
    progress = RunProgress(3, None)
    progress.see(LogLine("env", "Evaluating policy version 1"), 0.0)
    progress.see(LogLine(service, text.replace("{}", "1" * 5000)), 1.0)
    assert progress.bars(2.0)


def test_other_events_change_nothing() -> None:
    run = after(Interrupted(signal.SIGINT))
    assert run.bars(0.0) == [Bar("trainer", 0, 4, "step 0 of 4")]


def test_a_duration_has_two_units_at_most() -> None:
    assert [duration(each) for each in (-1, 48.4, 200, 7500)] == ["0 s", "48 s", "3 min 20 s", "2 h 5 min"]
