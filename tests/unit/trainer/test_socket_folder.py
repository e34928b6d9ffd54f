"""Sockets of vLLM's processes have names that the system takes, however long TMPDIR is."""

import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atropos_launcher.checks.checks import check_proxies, check_tmpdir
from atroposlib.processes.identity import this_process
from atroposlib.wire.processes import Process
from example_trainer import socket_folder as module
from example_trainer.socket_folder import LONGEST_PARENT, NoSocketFolder, socket_folder, usable_parent


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    yield monkeypatch
    tempfile.tempdir = None


def of_length(length: int) -> str:
    """A directory whose name has that many characters."""
    start = tempfile.mkdtemp(dir="/tmp")
    folder = Path(f"{start}/{'x' * (length - len(start) - 1)}")
    folder.mkdir()
    return str(folder)


@pytest.mark.parametrize("length", [40, 55, 56, 57, 58, 76, 90, 200])
def test_vllms_sockets_can_be_bound_whatever_the_length_of_tmpdir(temporary: pytest.MonkeyPatch, length: int) -> None:
    own = of_length(length)
    temporary.setenv("TMPDIR", own)
    temporary.setattr(tempfile, "tempdir", None)
    folder = socket_folder(None)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{folder}/{uuid.uuid4()}")  # as vLLM names it
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert folder.startswith(own) == (length <= LONGEST_PARENT)
    with socket.socket(socket.AF_UNIX) as bound:  # as Python's multiprocessing names it
        bound.bind(f"{tempfile.mkdtemp(prefix='pymp-')}/listener-12345678")


def test_without_a_short_directory_one_line_names_tmpdir(temporary: pytest.MonkeyPatch) -> None:
    own = of_length(90)
    temporary.setenv("TMPDIR", own)
    temporary.setattr(tempfile, "tempdir", None)
    temporary.setattr(module, "SHORT_FOLDERS", ("/nowhere",))
    with pytest.raises(NoSocketFolder, match=rf"^TMPDIR {own} has 90 characters.* may have {LONGEST_PARENT}"):
        socket_folder(None)
    assert check_tmpdir(own, usable_parent(own)).level == "fail"


def test_the_directory_of_a_killed_server_is_removed_at_the_next_start_and_no_other(
    temporary: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stayed in /tmp forever."""
    temporary.setattr(tempfile, "tempdir", str(tmp_path))
    temporary.setattr(module, "LONGEST_PARENT", 200)
    here = this_process()
    dead = msgspec.structs.replace(here, pid=2**22 - 1, started=1)
    living = Path(socket_folder(None))
    kept = {living} | {
        left_by(tmp_path / f"vllm-{name}", owner)
        for name, owner in {
            "boot": msgspec.structs.replace(dead, boot_id="of another machine, on a TMPDIR that they share"),
            "container": msgspec.structs.replace(dead, pid_namespace=1),
            "mine": None,
        }.items()
    }
    kept.add(left_by(tmp_path / "other-x", dead))
    kept.add(open_to_all := left_by(tmp_path / "vllm-open", dead))
    open_to_all.chmod(0o777)
    thesis = left_by(tmp_path / "thesis", dead)
    kept.add(link := tmp_path / "vllm-link")
    link.symlink_to(thesis)
    left_by(tmp_path / "vllm-killed", dead)
    left_by(tmp_path / "vllm-reused", msgspec.structs.replace(here, started=here.started + 1))
    kept.add(Path(socket_folder(None)))
    assert set(tmp_path.iterdir()) == kept | {thesis}
    assert (thesis / "socket").exists()


def left_by(folder: Path, owner: Process | None) -> Path:
    folder.mkdir(mode=0o700)
    (folder / "socket").touch()
    if owner is not None:
        (folder / module.OWNER).write_bytes(msgspec.json.encode(owner))
    return folder


def test_a_choice_of_the_users_is_checked() -> None:
    with pytest.raises(NoSocketFolder, match="VLLM_RPC_BASE_PATH has 90 characters"):
        socket_folder("/" + "x" * 89)


def test_the_doctor_knows_tmpdir_and_proxies() -> None:
    assert check_tmpdir("/tmp", "/tmp").level == "ok"
    assert check_tmpdir("/" + "x" * 70, "/tmp").level == "warn"
    assert "HTTPS_PROXY" in str(check_proxies({"HTTPS_PROXY": "http://proxy", "NO_PROXY": "a"}))
    assert "none" in str(check_proxies({"NO_PROXY": "a"}))
