"""What people read when a peer, a file or a library fails: one line with the value, the reason and the remedy."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from atroposlib import logs
from atroposlib.errors import AtroposError, loading, one_line_errors, reaching, reading, reason
from atroposlib.logs import drop_output, put


class Missing(AtroposError):
    exit_status = 3


def test_a_missing_file_is_one_line_with_its_path_the_reason_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    with pytest.raises(Missing) as raised, reading(f"cannot read {path}", Missing, remedy="give another --words"):
        path.read_text()
    assert str(raised.value) == f"cannot read {path}: No such file or directory; give another --words"
    assert isinstance(raised.value.__cause__, FileNotFoundError)


def test_content_that_cannot_be_decoded_is_a_reading_error() -> None:
    line = r"^state\.json: Expecting value: line 1 column 1 \(char 0\)$"
    with pytest.raises(Missing, match=line), reading("state.json", Missing):
        json.loads("")


def test_a_silent_peer_is_named_with_the_limit_of_the_wait() -> None:
    line = r"^http://peer: no reply within 30 s; start it$"
    with pytest.raises(Missing, match=line), reaching("http://peer", Missing, remedy="start it", limit_s=30):
        raise TimeoutError


def test_a_librarys_own_error_is_translated_only_if_it_is_named() -> None:
    class LibraryError(Exception):
        pass

    with pytest.raises(LibraryError), reaching("peer", Missing):
        raise LibraryError("as it is")
    with pytest.raises(Missing, match=r"^peer: said no$"), reaching("peer", Missing, also=(LibraryError,)):
        raise LibraryError("said no\nand a second line")


def test_a_library_that_is_not_installed_is_one_line() -> None:
    line = r"^nobody: No module named 'nobody_has_this'; pip install it$"
    with pytest.raises(Missing, match=line), loading("nobody", Missing, remedy="pip install it"):
        __import__("nobody_has_this")


def test_an_error_that_has_its_line_passes_as_it_is() -> None:
    line = AtroposError("already said; do this")
    with pytest.raises(AtroposError) as raised, reading("outer", Missing, also=(AtroposError,)):
        raise line
    assert raised.value is line


def test_a_programmers_error_is_not_translated() -> None:
    with pytest.raises(TypeError), reading("file", Missing):
        len(5)  # type: ignore[arg-type]


def test_main_prints_one_line_and_exits_with_the_errors_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, one_line_errors("grpo"):
        raise Missing("no model 'x'; give another")
    assert left.value.code == 3
    assert capsys.readouterr().err == "grpo: error: no model 'x'; give another\n"


def test_a_path_that_is_too_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, one_line_errors("grpo"):
        Path("a" * 5000).stat()
    assert left.value.code == 2
    assert capsys.readouterr().err == f"grpo: error: {'a' * 80}...: File name too long; give a shorter one\n"
    with pytest.raises(FileNotFoundError), one_line_errors("grpo"):
        Path("/no/such").stat()


def test_ctrl_c_ends_main_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, one_line_errors("grpo"):
        raise KeyboardInterrupt
    assert left.value.code == 130
    assert capsys.readouterr().err == "grpo: interrupted\n"


def test_an_error_without_text_is_named_by_its_type() -> None:
    assert reason(ValueError()) == "ValueError"
    assert reason(ValueError("\n  first\nsecond")) == "first"


def test_a_reader_of_the_output_that_has_gone_ends_main_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with pytest.raises(SystemExit) as ended, one_line_errors("atropos doctor"):
            print("3 checks", flush=True)
    assert ended.value.code == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("buffering", [1, -1])
@pytest.mark.parametrize("is_log", [False, True])
def test_output_that_a_full_disk_does_not_take_is_one_line_unless_it_is_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], buffering: int, is_log: bool
) -> None:
    monkeypatch.setattr(logs, "_exit_status_is_kept", kept := threading.Event())
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering)
    monkeypatch.setattr(sys, "stdout", full)
    if is_log:
        kept.set()
        with one_line_errors("grpo"):
            put("Step 1/3")
    else:
        with pytest.raises(SystemExit) as ended, one_line_errors("grpo"):
            print("usage: grpo")
        assert ended.value.code == 1
        shown = capsys.readouterr().err
        assert shown == "grpo: error: cannot write the output: No space left on device; free space\n"
    drop_output()
    full.close()  # as Python does at the end


def test_another_pipe_that_nobody_reads_is_no_broken_output() -> None:
    with pytest.raises(BrokenPipeError), one_line_errors("grpo"):
        raise BrokenPipeError
