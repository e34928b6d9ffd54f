"""A server without a model beside the arms of a comparison; what it uses is in no arm's metrics."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

START_S = 60.0
URL = re.compile(r"http://\S+/v1")


@contextmanager
def fake_server(answer: str) -> Iterator[str]:
    """Serve `answer` to every prompt, at the URL that is yielded, until the block ends."""
    command = [sys.executable, "-m", "atroposlib.testing.fake_inference_server", "--port", "0", "--answer", answer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield _url(process)
        finally:
            process.terminate()


def _url(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    end = time.monotonic() + START_S
    for line in process.stdout:
        if found := URL.search(line):
            return found.group()
        if time.monotonic() > end:
            break
    raise RuntimeError("the fake inference server names no address")
