"""What a name, a server's reply or a model's answer can do to a log: nothing but stand in it."""

import json
import logging
import re
import subprocess
import sys

import pytest

from atroposlib.logs import Repeats, escape, say

FORGED = "12:00:00 INFO    [api] Trainer registered: batch_size=999"
EVIL = f"evil\n{FORGED}\r\n{FORGED}\x1b[2J\x1b]0;owned\x07\x9b31m\u2028{FORGED}\u202etxt.exe\x00\t\x7f\u200b\ud800"
ESCAPED = rf"evil\n{FORGED}\r\n{FORGED}\x1b[2J\x1b]0;owned\x07\x9b31m\u2028{FORGED}\u202etxt.exe\x00\t\x7f\u200b\ud800"
AT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
ORDINARY = "✓ naïve Ωμέγα 数学\u3000环境 हिन्दी שלום 👩\u200d🔬 50\xa0% C:\\new"


def run(program: str, *arguments: str) -> list[str]:
    """The lines on stderr of a process that imports `logging` and EVIL and runs `program`."""
    preamble = f"import logging, sys\nEVIL = {EVIL!a}\nORDINARY = {ORDINARY!a}\n"
    command = [sys.executable, "-c", preamble + program, *arguments]
    ended = subprocess.run(command, capture_output=True, timeout=120)
    text = (ended.stderr + ended.stdout).decode().replace("\r\n", "\n")  # vLLM's formatter breaks tracebacks so
    assert text.replace(ORDINARY, "").replace("\n", "").isprintable()
    return text.split("\n")[:-1]


def test_control_characters_are_written_as_python_writes_them_and_letters_stay() -> None:
    assert escape(EVIL) == ESCAPED
    assert escape(ORDINARY) == ORDINARY
    assert escape(escape(EVIL)) == ESCAPED
    for number in [*range(32), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0x85, 0xFEFF]:
        assert escape(chr(number)).isprintable()
        assert len(escape(chr(number))) > 1


@pytest.mark.services
def test_a_process_with_too_many_open_files_can_log_it() -> None:
    program = """
import resource
from atroposlib.logs import configure_logging, get_logger
configure_logging("api")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError as error:
    get_logger("test").error("It is at its limit\\n%s", error)
"""
    (line,) = run(program)
    assert re.fullmatch(rf"{AT} ERROR   \[api\] It is at its limit\\n\[Errno 24\] Too many open files: .*", line)


@pytest.mark.services
@pytest.mark.parametrize(
    "call",
    ["log.info(EVIL)", "log.info('%s', EVIL)", "log.info('%s', Exception(EVIL))", "log.info('%(a)s', {'a': EVIL})"],
)
def test_a_record_is_one_line_whatever_is_logged(call: str) -> None:
    start = "from atroposlib.logs import *; configure_logging('environment'); log = get_logger('x'); "
    (line,) = run(start + call)
    assert "INFO" in line
    assert r"evil\n12:00:00" in line
    assert r"\x1b[2J" in line


@pytest.mark.services
def test_ordinary_text_of_every_script_is_logged_as_it_is() -> None:
    (line,) = run("from atroposlib.logs import *; configure_logging('a'); get_logger('x').info('%s', ORDINARY)")
    assert line.endswith(ORDINARY)


@pytest.mark.services
def test_a_traceback_keeps_its_lines_but_none_of_them_looks_like_a_record() -> None:
    lines = run(
        "from atroposlib.logs import *; configure_logging('a')\n"
        "try: raise ValueError(EVIL)\n"
        "except ValueError: get_logger('x').exception('it failed', stack_info=True)\n"
    )
    assert "it failed" in lines[0]
    assert lines[1] == "    | Traceback (most recent call last):"
    assert r"    | ValueError: evil" in lines
    assert len(lines) > 6
    assert all(line.startswith("    | ") for line in lines[1:])


@pytest.mark.services
def test_an_exception_that_nobody_catches_looks_like_no_record_either() -> None:
    lines = run("from atroposlib.logs import *; configure_logging('a'); raise ValueError(EVIL)")
    assert len(lines) > 3
    assert all(line.startswith("    | ") for line in lines)


@pytest.mark.services
def test_an_error_is_printed_with_its_further_lines_behind_bars() -> None:
    lines = run("from atroposlib.logs import *; print_error('grpo', 'vLLM died:\\n' + EVIL)")
    assert lines[:2] == ["grpo: error: vLLM died:", "    | evil"]
    assert all(line.startswith("    | ") for line in lines[1:])


@pytest.mark.services
def test_handlers_and_formatters_of_libraries_are_covered_too() -> None:
    lines = run(
        "from atroposlib.logs import *; configure_logging('a')\n"
        "theirs = logging.getLogger('theirs'); theirs.propagate = False\n"
        "handler = logging.StreamHandler(); theirs.addHandler(handler)\n"
        "handler.setFormatter(logging.Formatter('%(message)s'))\n"
        "theirs.warning('%s', EVIL)\n"
    )
    (line,) = lines
    assert re.fullmatch(rf"{AT} INFO    \[a\] {re.escape(escape(EVIL))}", line)


@pytest.mark.services
def test_json_lines_hold_the_same_text() -> None:
    (line,) = run("from atroposlib.logs import *; configure_logging('a', True); get_logger('x').info('%s', EVIL)")
    assert json.loads(line)["message"] == ESCAPED


@pytest.mark.rotating
@pytest.mark.services
def test_vllms_own_formatter_and_uvicorns_access_log_are_covered_by_the_plugin() -> None:
    lines = run(
        "from vllm.logger import init_logger\n"
        "from vllm.logging_utils import NewLineFormatter\n"
        "from vllm_patching.plugin import register\n"
        "register(); register()\n"
        "import uvicorn; uvicorn.Config(None).configure_logging()\n"
        "handler = logging.StreamHandler(); logging.getLogger('vllm').addHandler(handler)\n"
        "handler.setFormatter(NewLineFormatter('%(levelname)s [%(fileinfo)s] %(message)s'))\n"
        "init_logger('vllm.x').setLevel('INFO')\n"
        "init_logger('vllm.x').info('adapter %s', EVIL)\n"
        "logging.getLogger('uvicorn.error').info('%s', EVIL)\n"
        "logging.getLogger('uvicorn.access').info('%s - \"%s %s HTTP/%s\" %d', EVIL, 'GET', EVIL, '1.1', 200)\n"
        "try: raise ValueError(EVIL)\n"
        "except ValueError: init_logger('vllm.x').exception('it failed')\n"
    )
    assert len([line for line in lines if r"evil\n12:00:00" in line]) == 3
    assert not [line for line in lines if line.startswith("12:00:00")]
    assert [line for line in lines if line.startswith("ERROR") and "    | ValueError: evil" in line]


# --- the format -----------------------------------------------------------------------------------------------------


@pytest.mark.services
def test_a_line_has_date_level_and_process_and_the_run_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_RUN", "night")
    first, second, said = run(
        "from atroposlib.logs import *; configure_logging('trainer'); get_logger('x').warning('text')\nsay('Step 1/2')"
    )
    assert re.fullmatch(rf"{AT} INFO    \[trainer\] Run night: trainer is pid \d+", first)
    assert re.fullmatch(rf"{AT} WARNING \[trainer\] text", second)
    assert re.fullmatch(rf"{AT} INFO    \[trainer\] Step 1/2", said)


def test_what_is_said_without_a_log_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    say("Step 1/2 | reward 0.250")
    assert capsys.readouterr().out == "Step 1/2 | reward 0.250\n"


@pytest.mark.services
def test_json_lines_name_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_RUN", "night")
    lines = run("from atroposlib.logs import *; configure_logging('a', True); get_logger('x').info('text')")
    assert [json.loads(line)["run"] for line in lines] == ["night", "night"]


@pytest.mark.services
def test_vllm_and_uvicorn_log_in_the_same_format_and_leave_out_what_is_asked_all_the_time() -> None:
    lines = run(
        "import logging.config, json\n"
        "from vllm_patching.log_config import logging_config\n"
        "logging.config.dictConfig(json.loads(json.dumps(logging_config('INFO'))))\n"
        "logging.getLogger('vllm.engine').info('loaded in %d s', 7)\n"
        "logging.getLogger('vllm.engine').info('of the engine', extra={'vllm_process_name': 'EngineCore'})\n"
        "logging.getLogger('uvicorn.error').info('Application startup complete.')\n"
        "for path, status in ('/health', 200), ('/health', 503), ('/generate', 200), ('/v1/models', 200):\n"
        "    line = '%s - \"%s %s HTTP/%s\" %d'\n"
        "    logging.getLogger('uvicorn.access').info(line, '1.2.3.4:5', 'GET', path, '1.1', status)\n"
        "logging.getLogger('torch').warning('of another library')\n"
    )
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING) +\[vllm( EngineCore)?\] ", line) for line in lines
    )
    assert [line.partition("] ")[2] for line in lines] == [
        "loaded in 7 s",
        "of the engine",
        "Application startup complete.",
        '1.2.3.4:5 - "GET /health HTTP/1.1" 503',
        '1.2.3.4:5 - "GET /v1/models HTTP/1.1" 200',
        "of another library",
    ]


# --- lines that are alike -------------------------------------------------------------------------------------------


class Written:
    """What is written of records that come `every_s` seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.repeats = Repeats(lambda: self.now)
        self.lines: list[str] = []

    def log(self, message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord | None:
        info = None if error is None else (type(error), error, error.__traceback__)
        record = logging.LogRecord("x", logging.INFO, "x.py", 1, message, args, info)
        written = self.repeats.thinned(record)
        if written is not None:
            self.lines.append(written.getMessage())
        return written


def test_of_equal_lines_the_first_few_are_written_then_one_each_ten_seconds_with_the_count() -> None:
    written = Written()
    for _ in range(320):  # 40 s
        written.log("the grader failed")
        written.now += 0.125
    assert written.lines == ["the grader failed"] * 5 + [
        "the grader failed (75 more like this before)",
        *["the grader failed (79 more like this before)"] * 2,
    ]


def test_lines_that_differ_in_their_values_are_thinned_later() -> None:
    written = Written()
    for number in range(38 * 256):  # about what an environment without a useful group wrote
        written.log("Dropped a group of the item %s: %s", number, "all scores are 0")
        written.now += 1 / 256
    assert len(written.lines) == 53
    assert written.lines[-1].endswith("all scores are 0 (2559 more like this before)")


def test_lines_that_come_slowly_and_those_of_another_kind_are_all_written() -> None:
    written = Written()
    for step in range(200):
        written.log("Step %d is done", step)
        written.log("%s", f"line {step}")
        written.log("ready")
        written.now += 5
    assert len(written.lines) == 600


def test_a_traceback_is_written_once() -> None:
    written = Written()
    try:
        raise ValueError("in score")
    except ValueError as error:
        first, second = (written.log("it failed, %d in a row", row, error=error) for row in (1, 2))
    assert first is not None
    assert second is not None
    assert first.exc_info is not None
    assert second.exc_info is None
    assert written.lines[1] == "it failed, 2 in a row (its traceback is above)"
