"""A directory that one process writes and another reads: `manifest.json`, written last, holds the size and SHA-256 of
every file in it.
"""

import hashlib
import shlex
from pathlib import Path

import msgspec

MANIFEST = "manifest.json"
LATEST = "latest"  # beside checkpoints: the name of the newest
SHARDS = "shards"  # where a checkpoint that every trainer rank writes its part of has the weights


class FileRecord(msgspec.Struct):
    """A file of a directory, in its manifest."""

    bytes: int
    sha256: str


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The files of `folder` as they were written, by their paths in it. Raises OSError, and for a damaged manifest
    ValueError or RecursionError.
    """
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=dict[str, FileRecord])


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_sharded(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint in shards, which only the trainer reads."""
    return (folder / SHARDS).is_dir()


def needs_export(folder: Path) -> str:
    """Say what to do with a sharded checkpoint that a user wants to use as a model."""
    command = f"atropos export {shlex.quote(str(folder))} NEW_DIRECTORY"
    return f"{folder} is a sharded checkpoint, not a model: convert it with `{command}`"
