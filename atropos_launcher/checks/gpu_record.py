"""What `atropos gpu-check` found on this machine, kept in the user's cache. The doctor reads it.

The record holds for these GPUs with this driver; the doctor warns when they change. A table without all rows (--only,
--rows) and a rehearsal leave it alone.
"""

from pathlib import Path

import msgspec
from pydantic import Field

from atroposlib.config import Config
from atroposlib.errors import reason
from atroposlib.files import write_whole

RECORD = Path("atropos/gpu-check.json")  # below the user's cache


class UserCache(Config):
    """Holds what gpu-check takes from the environment."""

    cache_home: Path = Field(
        Path.home() / ".cache", description="cache of this user", json_schema_extra={"env": "XDG_CACHE_HOME"}
    )


class GpuRecord(msgspec.Struct, frozen=True):
    """The last whole run of gpu-check."""

    gpus: list[str]  # name and driver of each
    date: str
    vllm: str
    passed: int
    failed: list[str]  # names of checks
    skipped: int
    table: str  # the file


def write_gpu_record(path: Path, record: GpuRecord) -> None:
    """Raises OSError."""
    write_whole(path, msgspec.json.encode(record) + b"\n")


def read_gpu_record(path: Path) -> GpuRecord | str | None:
    """None where there is none, and a line where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=GpuRecord)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {reason(error)}"
