"""Where vLLM's server keeps the sockets between its processes. A socket's name has at most 107 characters, and a
cluster's TMPDIR may be longer than what vLLM's own names leave of them. The doctor asks here, too.
"""

import os
import tempfile

from atroposlib.errors import AtroposError
from atroposlib.logs import get_logger

log = get_logger(__name__)

LONGEST_NAME = 107  # of a Unix socket, on Linux
VLLM_NAME = 37  # a slash and a random id
PREFIX = "vllm-"
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
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    if parent != own:
        log.info("[vLLM Patch] TMPDIR has %d characters, too long for vLLM's sockets: they are in %s", len(own), folder)
    if len(own) > LONGEST_TMPDIR:  # the sockets between Python's own processes, too
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    return folder


def usable_parent(own: str) -> str | None:
    """`own`, or a shorter directory that can be written to; None if there is none."""
    short = (each for each in (own, *SHORT_FOLDERS) if len(os.fsencode(each)) <= LONGEST_PARENT)
    return next((each for each in short if os.access(each, os.W_OK | os.X_OK)), None)
