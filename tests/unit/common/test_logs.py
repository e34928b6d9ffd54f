"""What a name, a server's reply or a model's answer can do to a log: nothing but stand in it."""

import json
import subprocess
import sys

import pytest

from atroposlib.logs import escape
from atroposlib.names import check_name

FORGED = "12:00:00 INFO    [api] Trainer registered: batch_size=999"
EVIL = f"evil\n{FORGED}\r\n{FORGED}\x1b[2J\x1b]0;owned\x07\x9b31m\u2028{FORGED}\u202etxt.exe\x00\t\x7f\u200b\ud800"
ESCAPED = rf"evil\n{FORGED}\r\n{FORGED}\x1b[2J\x1b]0;owned\x07\x9b31m\u2028{FORGED}\u202etxt.exe\x00\t\x7f\u200b\ud800"
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
    assert lines == [escape(EVIL)]


@pytest.mark.services
def test_json_lines_hold_the_same_text() -> None:
    (line,) = run("from atroposlib.logs import *; configure_logging('a', True); get_logger('x').info('%s', EVIL)")
    assert json.loads(line)["message"] == ESCAPED


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


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a" * 128, "Ω✓ 数学", "with space", "a/b:c"])
def test_a_name_is_up_to_128_printable_characters(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["a" * 129, "a\n", "\x1b[2J", "a\x9bb", "a\u202eb", "a\u2028b", "\ud800", "a\tb", "a\u200b"], ids=ascii
)
def test_other_names_are_refused_with_the_limit(name: str) -> None:
    with pytest.raises(ValueError, match="at most 128 characters"):
        check_name(name)
