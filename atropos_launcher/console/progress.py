"""The progress of a run, derived from events and log lines. live_console.py draws it as bars.

Everything here is a function of its arguments, including the time.
"""

import re
from collections import deque
from dataclasses import dataclass, field

from atropos_launcher.run_file.servers import is_server
from atropos_launcher.run_file.teacher import TEACHER
from atropos_launcher.service import is_trainer
from atropos_launcher.services.events import Died, Ended, Event, LogLine, Restarted, Started, Up, Waiting
from atroposlib.processes.log_files import printable

STARTING = "starting"
# What vLLM does until it serves, in its order, and the lines that say that it has come so far.
VLLM_STAGES = (
    (STARTING, r"\[vLLM Patch\] weight bridge"),
    ("reading the model's configuration", r"Resolved architecture|Using max model len"),
    ("starting the engine", r"Initializing a V\d LLM engine"),
    ("loading weights", r"Starting to load model|safetensors checkpoint shards|Loading weights took"),
    ("compiling", r"Dynamo bytecode|Compiling a graph|torch\.compile took|Start compiling"),
    ("reserving the KV cache", r"KV cache memory|KV cache size|for KV cache|KV cache layout|Memory profiling takes"),
    ("warming up", r"Capturing CUDA graphs|Graph capturing finished"),
    ("opening its port", r"init engine \(|Uvicorn running|Starting vLLM server"),
)
_VLLM_LINES = [(name, re.compile(pattern)) for name, pattern in VLLM_STAGES]
_PART = re.compile(r"(^|\] )(?P<what>[^|%\]]{0,80}?):? +(?P<percent>\d{1,3})%(\|| Completed)")
# A log may hold what a model wrote, and Python reads no integer of thousands of digits.
_STEP = re.compile(r"Step (?P<done>\d{1,9})/(?P<total>\d{1,9}) ?\|(.* step (?P<seconds>\d{1,9}(\.\d{1,9})?) s)?")
_EVALUATING = re.compile(r"Evaluating policy version (?P<policy>\d{1,16})(?!\d)")
_EVALUATED = re.compile(r"Evaluated (?P<done>\d{1,9}) of (?P<total>\d{1,9})(?!\d)")
_ACCURACY = re.compile(r"Held-out accuracy ")
_FAILED = re.compile(r"The evaluation of policy version \d+ failed")
_BATCH_SENT = re.compile(r"Batch (?P<number>\d{1,9}) sent")
# What the trainer does, and the lines with which that begins.
TRAINER_PHASES = (
    ("loading the model", r"Loading \S+ on "),
    ("waiting for vLLM", r"Waiting for the vLLM server|Waiting for \d+ weight updater"),
    ("waiting for samples", r"Waiting for a batch"),
    ("training", r"Got a batch"),
    ("sending weights", r"Broadcasting policy version"),
    ("waiting for the evaluation", r"Waiting for the evaluation"),
    ("writing the model", r"Writing the trained model"),
    ("", r"Step \d+/\d+ ?\|"),
)
_TRAINER_LINES = [(name, re.compile(pattern)) for name, pattern in TRAINER_PHASES]
STEPS_AVERAGED = 10


@dataclass(frozen=True)
class Bar:
    """`done` of `total`, None where nobody knows."""

    name: str
    done: float | None
    total: float | None
    note: str


@dataclass(frozen=True)
class Part:
    """A download, or the shards of a model: how far a bar in a log is."""

    what: str
    percent: int


@dataclass
class _Start:
    """A service that does not answer yet."""

    since: float
    limit_s: float
    stage: int = 0
    part: Part | None = None


@dataclass
class _Evaluation:
    policy: int
    since: float
    done: int | None = None
    total: int | None = None


@dataclass
class RunProgress:
    """Holds what is known of a run. `groups` make a batch, None where environments have groups of different sizes."""

    steps: int
    groups: int | None
    done: int = 0
    batches: int = 0
    queued: int | None = None  # groups that the batching API holds
    _starts: dict[str, _Start] = field(default_factory=dict)
    _downloads: dict[str, Part] = field(default_factory=dict)
    _evaluations: dict[str, _Evaluation] = field(default_factory=dict)
    _evaluation_s: dict[str, float] = field(default_factory=dict)  # how long the last one took
    _phase: str = ""
    _phase_since: float = 0.0
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_AVERAGED))
    _last_step: float | None = None

    def see(self, event: Event, now: float) -> None:
        """Take an event in; `now` is a clock's time in seconds."""
        match event:
            case Waiting(service, _, limit_s):
                self._starts[service] = _Start(now, limit_s)
            case Started("trainer") | Restarted("trainer"):
                self._turn_to(STARTING, now)
            case Up(service) | Ended(service) | Died(service):
                for running in (self._starts, self._downloads, self._evaluations):
                    running.pop(service, None)
                if service == "trainer":
                    self._turn_to("", now)
            case LogLine(service, line):
                self._read(service, line, now)

    def bars(self, now: float) -> list[Bar]:
        """List what takes time at the moment, the steps last."""
        bars = [_start_bar(service, start, now) for service, start in self._starts.items()]
        bars += [
            Bar(service, part.percent, 100, f"{part.what} {part.percent} %")
            for service, part in self._downloads.items()
            if part.percent < 100
        ]
        bars += [self._evaluation_bar(service, each, now) for service, each in self._evaluations.items()]
        if self.queued is not None and not self._starts and self.batches < self.steps:
            bars.append(groups_bar(self.queued, self.groups, self.batches + 1))
        return [*bars, self._steps_bar(now)]

    def _read(self, service: str, line: str, now: float) -> None:
        if service in self._starts:
            start = self._starts[service]
            start.stage = max(start.stage, vllm_stage(line)) if serves(service) else 0
            start.part = part_of(line)
        elif part := part_of(line):
            self._downloads[service] = part
        if service == "api":
            if sent := _BATCH_SENT.search(line):
                self.batches, self.queued = int(sent["number"]), 0
        elif service == "trainer":
            self._read_trainer(line, now)
        elif not serves(service) and not is_trainer(service):
            self._read_environment(service, line, now)

    def _read_trainer(self, line: str, now: float) -> None:
        phase = trainer_phase(line)
        if phase is not None and phase != self._phase:
            self._turn_to(phase, now)
        if step := _STEP.search(line):
            self.done, self.steps = int(step["done"]), int(step["total"])
            if self._last_step is not None:
                self._step_s.append(now - self._last_step)
            elif step["seconds"]:
                self._step_s.append(float(step["seconds"]))
            self._last_step = now

    def _read_environment(self, service: str, line: str, now: float) -> None:
        if begun := _EVALUATING.search(line):
            self._evaluations[service] = _Evaluation(int(begun["policy"]), now)
        elif service in self._evaluations:
            if some := _EVALUATED.search(line):
                self._evaluations[service].done = int(some["done"])
                self._evaluations[service].total = int(some["total"])
            elif _ACCURACY.search(line):
                self._evaluation_s[service] = now - self._evaluations.pop(service).since
            elif _FAILED.search(line):
                del self._evaluations[service]

    def _turn_to(self, phase: str, now: float) -> None:
        self._phase, self._phase_since = phase, now

    def _evaluation_bar(self, service: str, each: _Evaluation, now: float) -> Bar:
        spent, last = now - each.since, self._evaluation_s.get(service)
        note = f"evaluating policy {each.policy}"
        if each.total:
            return Bar(service, each.done, each.total, f"{note}: {each.done} of {each.total} answers")
        if last is None:
            return Bar(service, None, None, f"{note}, {duration(spent)}")
        return Bar(service, min(spent, last), last, f"{note}, {duration(spent)} (the last took {duration(last)})")

    def _steps_bar(self, now: float) -> Bar:
        notes = [f"step {self.done} of {self.steps}"]
        if self._phase:
            notes.append(f"{self._phase} {duration(now - self._phase_since)}")
        left_s = seconds_left(self.steps - self.done, self._step_s, now - (self._last_step or now))
        if left_s is not None:
            notes.append(f"about {duration(left_s)} left")
        return Bar("trainer", self.done, self.steps, ", ".join(notes))


def serves(service: str) -> bool:
    """Return whether it is a vLLM server, of the run or of its teacher."""
    return is_server(service) or service == TEACHER


def vllm_stage(line: str) -> int:
    """The stage that a line of vLLM's log belongs to, an index of VLLM_STAGES; 0 if it does not tell."""
    return next((number for number, (_, pattern) in enumerate(_VLLM_LINES) if pattern.search(line)), 0)


def trainer_phase(line: str) -> str | None:
    """Return what the trainer does from this line on, empty when a step is over; None if the line does not tell."""
    return next((name for name, pattern in _TRAINER_LINES if pattern.search(line)), None)


def part_of(line: str) -> Part | None:
    """Read a line that is a progress bar, as downloads and loaders write them."""
    match = _PART.search(line)
    if not match or int(match["percent"]) > 100:
        return None
    return Part(printable(match["what"]).strip(), int(match["percent"]))


def seconds_left(steps: int, step_s: deque[float], since_last_s: float) -> float | None:
    """Until the last step, if each takes as long as the last few did; None where that tells nothing."""
    if not step_s or steps <= 0:
        return None
    mean = sum(step_s) / len(step_s)
    left_s = (steps - 1) * mean + max(0.0, mean - since_last_s)
    return left_s if left_s > 0 else None


def groups_bar(queued: int, groups: int | None, batch: int) -> Bar:
    """Groups that wait for the next batch. More than one batch may wait."""
    if groups is None:
        return Bar("sampling", None, None, f"{queued} groups for batch {batch}")
    more = f" ({queued - groups} more wait)" if queued > groups else ""
    done = min(queued, groups)
    return Bar("sampling", done, groups, f"{done} of {groups} groups for batch {batch}{more}")


def duration(seconds: float) -> str:
    """`48 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _start_bar(service: str, start: _Start, now: float) -> Bar:
    spent = f"{duration(now - start.since)} of at most {duration(start.limit_s)}"
    part = f" {start.part.percent} %" if start.part else ""
    if not serves(service):
        return Bar(service, None, None, f"{STARTING}{part}, {spent}")
    name, stages = VLLM_STAGES[start.stage][0], len(VLLM_STAGES)
    within = start.part.percent / 100 if start.part else 0.0
    return Bar(service, start.stage + within, stages, f"{name}{part}, {spent}")
