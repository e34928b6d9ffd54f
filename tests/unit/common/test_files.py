"""Files that a flag names are written only where there is a regular file, or nothing; and read only where one is."""

import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.data.dataset import DatasetConfig, local_tables
from atroposlib.envs.errors import DataError
from atroposlib.envs.files.html_report import write_html
from atroposlib.envs.files.records import JsonlWriter, append_jsonl
from atroposlib.envs.metrics import JsonlSink as EnvironmentSink
from atroposlib.files import NotRegularFile, expect_regular, open_regular, write_whole
from atroposlib.processes.child_group import ChildGroup
from example_trainer.output.metrics import JsonlSink
from example_trainer.plot import plot_rewards
from tests.unit.common.disk import broken_disk, expect_durable, watch_disk
from tests.unit.trainer.loop.test_trainer_run import BROADCAST


def a_link(path: Path) -> None:
    path.with_name("target").write_text("mine\n")
    path.symlink_to("target")


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def a_device(path: Path) -> None:
    """What /dev/null is; its own number needs the right to make devices, so that a container without it links to
    /dev/null's.
    """
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        path.symlink_to("/dev/null")


def write_page(path: Path) -> None:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as rows:
        write_html(Path(rows.name), path)


OBSTACLES: list[Callable[[Path], None]] = [a_link, a_dangling_link, a_socket, a_device, os.mkfifo, Path.mkdir]
WRITERS: dict[str, Callable[[Path], object]] = {
    "trainer metrics": lambda path: JsonlSink(path, first_step=1),
    "resumed trainer metrics": lambda path: JsonlSink(path, first_step=2),
    "environment metrics": EnvironmentSink,
    "groups": JsonlWriter,
    "evaluations": lambda path: append_jsonl(path, {}),
    "page": write_page,
    "plot": lambda path: plot_rewards({}, [], path),
    "log of a server": lambda path: ChildGroup(["true"], path, {}),
    "whole file": lambda path: write_whole(path, b""),
    "any file": lambda path: open_regular(path, "ab"),
}


def state_of(folder: Path) -> list[tuple[str, int, int, bytes]]:
    found = []
    for path in sorted(folder.iterdir()):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found.append((path.name, status.st_ino, status.st_mode, content))
    return found


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_but_a_regular_file_is_written_renamed_or_replaced(
    tmp_path: Path, writer: str, obstacle: Callable[[Path], None]
) -> None:
    path = tmp_path / "output.jsonl"
    obstacle(path)
    before = state_of(tmp_path)
    with pytest.raises(
        NotRegularFile, match=r"output.jsonl cannot be written: it is a \w+, not a regular file; choose another file"
    ):
        WRITERS[writer](path)
    assert state_of(tmp_path) == before


def test_regular_and_absent_files_are_taken_below_a_linked_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link/one", b"1")
    write_whole(tmp_path / "link/one", b"2")
    assert expect_regular(tmp_path / "link/one").read_bytes() == b"2"
    assert os.listdir(tmp_path / "real") == ["one"]


def test_a_whole_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"old", b"new"):
        with monkeypatch.context() as patch:
            acts = watch_disk(patch)
            write_whole(tmp_path / "one", content)
        expect_durable(acts, tmp_path / "one")


def test_a_disk_that_fails_at_the_flush_leaves_the_old_file(tmp_path: Path) -> None:
    write_whole(tmp_path / "one", b"old")
    with broken_disk(), pytest.raises(OSError, match="Input/output error"):
        write_whole(tmp_path / "one", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"one": b"old"}


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "one", b"old")
    with pytest.raises(TypeError):
        write_whole(tmp_path / "one", "text")  # type: ignore[arg-type]
    (tmp_path / f".one.partial-{os.getpid()}").unlink()
    (tmp_path / f".one.partial-{os.getpid()}").symlink_to("one")
    with pytest.raises(NotRegularFile):
        write_whole(tmp_path / "one", b"new")
    assert (tmp_path / "one").read_bytes() == b"old"


def test_the_trainer_refuses_a_device_for_its_metrics_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from example_trainer import grpo

    with pytest.raises(SystemExit) as ended:
        grpo.main(["--model", "m", *BROADCAST, "--metrics-path", "/dev/null"])
    assert ended.value.code == 2
    assert (
        "/dev/null cannot be written: it is a device, not a regular file; choose another file"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["data_path_to_save_groups", "evaluations_path", "held_out_path", "metrics_path"])
def test_an_environment_refuses_a_device_when_it_is_configured(name: str) -> None:
    with pytest.raises(ValueError, match="/dev/null cannot be written: it is a device"):
        BaseEnvConfig(**{name: "/dev/null"})


@pytest.mark.parametrize("obstacle", [a_socket, a_device, os.mkfifo], ids=lambda make: make.__name__)
def test_what_waits_for_ever_or_has_no_end_is_not_read(tmp_path: Path, obstacle: Callable[[Path], None]) -> None:
    refused = r"train.jsonl cannot be read: it is a \w+, not a regular file; choose another file"
    obstacle(tmp_path / "train.jsonl")
    (tmp_path / "link").symlink_to("train.jsonl")
    with pytest.raises(ValueError, match=refused):
        BaseEnvConfig(chat_template=str(tmp_path / "train.jsonl"))
    with pytest.raises(ValueError, match=refused.replace("train.jsonl", "link")):
        DatasetConfig(source=str(tmp_path / "link"))
    with pytest.raises(DataError, match="it is a"):  # in a directory
        local_tables(tmp_path)
    assert DatasetConfig(source=str(tmp_path), test_source=str(tmp_path / "absent")).source
