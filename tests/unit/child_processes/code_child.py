"""A child of `ChildPool` that runs the code which it is sent: what a model would, if a scorer let it."""

import contextlib
import io
from typing import Any

from atroposlib.child_processes.loop import answer_requests


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What `code` left in `result`, or what it raised."""
    names: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(request["code"], names)
    except BaseException as error:
        return {"raised": f"{type(error).__name__}: {error}"[:300]}
    return {"result": names.get("result")}


if __name__ == "__main__":
    answer_requests(answer)
