"""Who may write, and for how long: locks of a file or a directory, in threads of this process."""

import errno
import fcntl
import os
import socket
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.processes import lock_files


class Held(Exception):
    """What these tests have it raise."""


ME = f"process {os.getpid()} on {socket.gethostname()}"


def alone_in(path: Path, **given: Any) -> AbstractContextManager[None]:
    return lock_files.alone_in(path, Held, str, **given)


def test_the_second_is_refused_by_name_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results"
    with alone_in(path):
        with pytest.raises(Held, match=ME), alone_in(path):
            pytest.fail("it is held")
        with alone_in(path.with_name("others")):  # nobody's
            pass
        assert [each.name for each in path.parent.iterdir()] == [".results.lock"]
    assert not list(path.parent.iterdir())
    with alone_in(path):
        pass


def test_who_waits_is_told_once_who_holds_it_and_has_it_next(tmp_path: Path) -> None:
    told, has_it, waits = list[str](), threading.Event(), threading.Event()

    def waiting(holder: str) -> None:
        told.append(holder)
        waits.set()

    def next_one() -> None:
        with alone_in(tmp_path / "results", patience_s=60.0, waiting=waiting):
            has_it.set()

    thread = threading.Thread(target=next_one)
    with alone_in(tmp_path / "results"):
        thread.start()
        assert waits.wait(60)
        assert not has_it.wait(0.3)
    assert has_it.wait(60)
    thread.join(60)
    assert told == [ME]


def test_what_a_killed_holder_left_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / ".results.lock").write_text("process 999999 on a machine")
    with alone_in(tmp_path / "results"):
        assert (tmp_path / ".results.lock").read_text() == ME


def test_the_working_directory_is_locked_like_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with alone_in(Path()), pytest.raises(Held, match=ME), alone_in(Path()):
        pytest.fail("it is held")


def test_text_of_a_lock_file_is_escaped(tmp_path: Path) -> None:
    with alone_in(tmp_path / "results"):
        (tmp_path / ".results.lock").write_text("\x1b[2Jprocess\n1")
        with pytest.raises(Held) as refused, alone_in(tmp_path / "results"):
            pytest.fail("it is held")
    assert str(refused.value).isprintable()


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".results.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(Held, match=os.strerror(errno.ELOOP)), alone_in(tmp_path / "results"):
        pytest.fail("it is a link")
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without)
    with alone_in(tmp_path / "results"), alone_in(tmp_path / "results"):
        pass
