"""What a process brings to its disk, and in which order. No kill shows it: the page cache outlives a process, and only
a power failure loses what was never flushed.
"""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest


class Act(NamedTuple):
    """A file or directory was flushed with `content`, or came to lie at `path` by a rename."""

    kind: Literal["flush", "rename"]
    path: Path
    inode: int
    content: bytes


def watch_disk(monkeypatch: pytest.MonkeyPatch) -> list[Act]:
    """All flushes and renames from here on, in order. Those of SQLite, which is written in C, are not seen."""
    acts: list[Act] = []

    def flushing(name: Literal["fsync", "fdatasync"]) -> None:
        flush = getattr(os, name)

        def noted(descriptor: int) -> None:
            flush(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            acts.append(Act("flush", path, path.stat().st_ino, _content(path)))

        monkeypatch.setattr(os, name, noted)

    def renaming(name: Literal["rename", "replace"]) -> None:
        rename = getattr(os, name)

        def noted(source: str | Path, target: str | Path) -> None:
            rename(source, target)
            acts.append(Act("rename", Path(target), Path(target).stat().st_ino, b""))

        monkeypatch.setattr(os, name, noted)

    flushing("fsync")
    flushing("fdatasync")
    renaming("rename")
    renaming("replace")
    return acts


@contextlib.contextmanager
def broken_disk() -> Iterator[None]:
    """A disk that fails when it is to be flushed."""

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        yield


def expect_durable(acts: list[Act], target: Path) -> tuple[int, int]:
    """`target`, and all that lies in it, was flushed as it is now before it got its name, and its name after that.

    The places of both among the acts: the rename, and the flush of the directory that holds the name.
    """
    renamed = max(at for at, act in enumerate(acts) if act.kind == "rename" and act.path == target)
    flushed = {act.inode: act.content for act in acts[:renamed] if act.kind == "flush"}
    for path in [target, *target.rglob("*")]:
        inode = path.stat().st_ino
        assert inode in flushed, f"{path} has its name before it is on the disk"
        assert flushed[inode] == _content(path), f"{path} was flushed before it was whole"
    named = [at for at, act in enumerate(acts) if at > renamed and _names(act, target)]
    assert named, f"{target.parent} is not flushed after it holds the name {target.name}"
    return renamed, named[0]


def _names(act: Act, target: Path) -> bool:
    return act.path == target.parent and target.name.encode() in act.content.split(b"\0")


def _content(path: Path) -> bytes:
    """The bytes of a file, the names in a directory."""
    return b"\0".join(sorted(os.fsencode(name) for name in os.listdir(path))) if path.is_dir() else path.read_bytes()


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 2) -> Iterator[Path]:
    """A file system of this size at the new directory `folder`. Raises PermissionError where nobody may mount one."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    mounted = subprocess.run(options, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise PermissionError(mounted.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the room that is left on the disk of `folder`."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return filler
