"""Where vLLM's server keeps the sockets between its processes. A socket's name has at most 107 characters, and a
cluster's TMPDIR may be longer than what vLLM's own names leave of them. The doctor asks here, too.

A server removes its directory when it ends. One that is killed cannot, so each directory names its server, and the next
start removes those of servers that have ended.
"""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from atroposlib.errors import AtroposError
from atroposlib.logs import get_logger
from atroposlib.processes.identity import still_runs, this_process
from atroposlib.wire.processes import Process

log = get_logger(__name__)

LONGEST_NAME = 107  # of a Unix socket, on Linux
VLLM_NAME = 37  # a slash and a random id
PREFIX = "vllm-"
OWNER = "atropos-owner.json"  # the server, in its directory
LONGEST_FOLDER = LONGEST_NAME - VLLM_NAME
LONGEST_PARENT = LONGEST_FOLDER - len(f"/{PREFIX}12345678")
LONGEST_TMPDIR = LONGEST_NAME - len("/pymp-12345678/listener-12345678")  # of Python's multiprocessing
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class NoSocketFolder(AtroposError):
    """No directory is short enough, or none of those can be written to."""


def socket_folder(given: str | None) -> str:
    """A new private directory for sockets: under TMPDIR, or where that is too long under a shorter one. `given` is the
    user's own choice (VLLM_RPC_BASE_PATH), which is checked. Raises NoSocketFolder.
    """
    if given and len(given) > LONGEST_FOLDER:
        raise NoSocketFolder(
            f"VLLM_RPC_BASE_PATH has {len(given)} characters, and a directory for vLLM's sockets may have"
            f" {LONGEST_FOLDER}: set a shorter one, or none"
        )
    own = tempfile.gettempdir()
    parent = own if given else usable_parent(own)
    if parent is None:
        raise NoSocketFolder(
            f"TMPDIR {own} has {len(own)} characters, and a directory for vLLM's sockets may have {LONGEST_PARENT}:"
            f" {', '.join(SHORT_FOLDERS)} cannot be written to; set TMPDIR to a shorter directory"
        )
    _remove_leftovers(parent)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    Path(folder, OWNER).write_bytes(msgspec.json.encode(this_process()))
    if parent != own:
        log.info("[vLLM Patch] TMPDIR has %d characters, too long for vLLM's sockets: they are in %s", len(own), folder)
    if len(own) > LONGEST_TMPDIR:  # the sockets between Python's own processes, too
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def usable_parent(own: str) -> str | None:
    """`own`, or a shorter directory that can be written to; None if there is none."""
    short = (each for each in (own, *SHORT_FOLDERS) if len(os.fsencode(each)) <= LONGEST_PARENT)
    return next((each for each in short if os.access(each, os.W_OK | os.X_OK)), None)


def _remove_leftovers(parent: str) -> None:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_left(entry):
                log.info("[vLLM Patch] Removing %s, left by a server that was killed", entry.path)
                shutil.rmtree(entry.path, ignore_errors=True)  # which follows no link


def _is_left(entry: os.DirEntry[str]) -> bool:
    """Return whether a server of this user made the directory, on this machine since its boot, and has ended."""
    try:
        status = entry.stat(follow_symlinks=False)
        open_to_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)  # who could write an owner there
        if not stat.S_ISDIR(status.st_mode) or open_to_others or status.st_uid != os.geteuid():
            return False
        owner = msgspec.json.decode(Path(entry.path, OWNER).read_bytes(), type=Process)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return owner.same_place(this_process()) and not still_runs(owner)
