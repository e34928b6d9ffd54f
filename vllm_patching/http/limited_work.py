"""Work of vLLM's libraries on texts from outside, in a child process that can be killed: never in the server itself.

    tool_calls.py ──parse──┐
    endpoint.py ──compile──┴▶ LimitedWork ──▶ vllm_child.py (vLLM and the tokenizer, loaded once) ──▶ a fork per request

Requests wait for others of their lane alone, such as those of one parser. A late fork is killed by the kernel; the next
one takes milliseconds. A child that dies is started again by the next request, which takes as long as importing vLLM.
"""

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from atroposlib.child_processes.lines import LineChild
from atroposlib.child_processes.pool import ChildFailed
from vllm_patching.compat import vllm_engine

log = vllm_engine.init_logger("vllm.atropos_bridge")

CHILD = "vllm_patching.http.vllm_child"
START_LIMIT_S = 180.0
SILENCE_LIMIT_S = 60.0
AT_ONCE = 2  # of one lane
HIDDEN = ("VLLM_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "CUDA_VISIBLE_DEVICES")


class LimitedWork:
    """`order` is what vllm_child.py is told."""

    def __init__(self, order: Mapping[str, object]) -> None:
        self._order = order
        self._child: LineChild | None = None
        self._starting = asyncio.Lock()
        self._lanes: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    async def ask(self, do: str, lane: str, limit_s: float, **content: object) -> dict[str, Any]:
        """The reply of a fork of its own. Raises ChildRefused with its error, also if it is late, and ChildFailed."""
        async with self._lanes[lane]:
            child = await self.started()
            within_s = limit_s + SILENCE_LIMIT_S  # the kernel's alarm comes first
            try:
                reply: dict[str, object] = await child.ask(do, within_s, time_limit_s=limit_s, **content)
            except TimeoutError:
                raise ChildFailed(f"it did not even fork within {within_s:g} s") from None
            return reply

    async def started(self) -> LineChild:
        """The child, once it can answer. Raises ChildFailed."""
        async with self._starting:
            if self._child is not None and self._child.is_alive:
                return self._child
            began = time.monotonic()
            log.info("Starting a process for tool parsers and grammars (at most %.0f s)", START_LIMIT_S)
            command = (sys.executable, "-u", "-P", "-m", CHILD, json.dumps(self._order))
            self._child = child = LineChild(command, environment=_environment(), silence_limit_s=START_LIMIT_S)
            await child.start()
            try:
                await child.ask("ping", START_LIMIT_S)
            except TimeoutError:
                await child.close()
                raise ChildFailed(f"it was not ready within {START_LIMIT_S:g} s") from None
            log.info("The process for tool parsers and grammars is ready after %.1f s", time.monotonic() - began)
            return child

    async def warm_up(self) -> None:
        """Start the child before anyone asks; one that cannot start is reported, and tried again when asked."""
        try:
            await self.started()
        except ChildFailed as error:
            log.error("The process for tool parsers and grammars cannot start: %s", error)

    async def close(self) -> None:
        """End the child."""
        if self._child is not None:
            await self._child.close()


def _environment() -> dict[str, str]:
    """This process's, without keys; with one thread for each library, so that a fork has all of them."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return {**kept, **threads, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "VLLM_PLUGINS": ""}
