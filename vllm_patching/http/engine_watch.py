"""Checks from the API process, every two seconds, whether vLLM's engine process still answers.

A process that is stuck and a thread that died look the same from here: a call gets no reply. While that lasts, /health
and every route that needs the engine, a trainer's heartbeat included, answer 503 with the reason instead of waiting
forever. A call waits for the step in progress, so the deadline must be longer than the longest step.
"""

import asyncio
import signal
import time

from starlette.types import Scope

from vllm_patching import vllm_types
from vllm_patching.compat import vllm_engine
from vllm_patching.http.gate import generates

log = vllm_engine.init_logger("vllm.atropos_bridge")

ASK_EVERY_S = 2.0
# vLLM ends a server whose engine died; for this many seconds, /health still answers with the reason
LAST_WORDS_S = 15.0
HEALTH = ("/health", "/ping")


class EngineWatch:
    """`reason` is why the engine cannot be used now, None while it answers."""

    def __init__(self) -> None:
        self._engine: vllm_types.EngineClient = None
        self._silent: str | None = None
        self._is_ending = False  # by vLLM, as the server is to end
        self._task: asyncio.Task[None] | None = None

    def start(self, engine: vllm_types.EngineClient, deadline_s: float) -> None:
        """Begin to ask `engine`, vLLM's client of its engine process; needs a running event loop."""
        self._engine = engine
        vllm_engine.tell_end(engine, self._note_end)
        self._task = asyncio.create_task(self._watch(engine, deadline_s))

    def _note_end(self) -> None:
        self._is_ending = not self._engine.errored

    @property
    def reason(self) -> str | None:
        if self._is_ending:
            return "this vLLM server is ending"
        if self._engine is not None and self._engine.errored:
            return (
                "vLLM's engine has died: its process or one of its threads ended; its log has the cause. Start the"
                " server again"
            )
        return self._silent

    def why_not(self, request: Scope) -> str | None:
        """Explain why `request` cannot be answered now: `reason`, if it needs the engine."""
        needed = request["type"] == "http" and (request["path"] in HEALTH or request["path"].startswith("/v1/bridge/"))
        return self.reason if needed or generates(request) else None

    async def _watch(self, engine: vllm_types.EngineClient, deadline_s: float) -> None:
        while not (engine.errored or self._is_ending):
            call, asked = asyncio.create_task(engine.is_paused()), time.monotonic()
            while not call.done() and not engine.errored:
                await asyncio.wait({call}, timeout=min(1.0, deadline_s / 4))
                if not call.done() and time.monotonic() - asked > deadline_s and self._silent is None:
                    self._silent = (
                        f"vLLM's engine has not answered for {deadline_s:g} s (--engine-deadline-s): it "
                        "is stuck or receives nothing; see its log, and start the server again unless it "
                        "comes back"
                    )
                    log.error(self._silent)
            call.cancel()  # no effect on a call that is done; an error is an answer, too
            await asyncio.gather(call, return_exceptions=True)
            if self._silent is not None and not engine.errored:
                log.info("vLLM's engine answers again after %.0f s", time.monotonic() - asked)
            self._silent = None
            await asyncio.sleep(ASK_EVERY_S)
        if self._is_ending:
            return
        log.error("%s. This server ends in %.0f s", self.reason, LAST_WORDS_S)
        await asyncio.sleep(LAST_WORDS_S)
        signal.raise_signal(signal.SIGTERM)
