"""The last check of structured outputs: those within bounds are compiled, and stepped, in a process that is killed when
late. vLLM compiles them again in its engine, whose loop waits for each step of each grammar.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping

from atroposlib.child_processes.lines import ChildRefused
from atroposlib.child_processes.pool import ChildFailed
from atroposlib.wire.typed import printable
from vllm_patching.compat import vllm_engine, vllm_requests
from vllm_patching.http.limited_work import LimitedWork

Bounds = Callable[[Mapping[str, object]], str | None]
COMPILE_LIMIT_S = 3.0
LANE = "grammars"
REMEMBERED = 256  # grammars that passed, so that a schema of many requests is compiled once


class GrammarCheck:
    """Passes only what is within `bounds`, which names a reason if not, and compiles within the limit."""

    def __init__(self, work: LimitedWork, bounds: Bounds, time_limit_s: float = COMPILE_LIMIT_S) -> None:
        self._work = work
        self._bounds = bounds
        self._time_limit_s = time_limit_s
        self._passed: OrderedDict[str, None] = OrderedDict()

    async def expect_fast(self, fields: Mapping[str, object]) -> None:
        """Raise ClientError, a 400 on every route, for what xgrammar refuses, and what is late or slow."""
        if (why := self._bounds(fields)) is not None:  # of a record that was made without its own check
            raise vllm_requests.ClientError(why)
        key = json.dumps(fields, sort_keys=True, default=str)
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        try:
            await self._work.ask("compile", LANE, self._time_limit_s, fields=fields)
        except ChildRefused as error:
            why = printable(str(error), 500)
            if not error.is_wrong:
                late = f"takes longer than {self._time_limit_s:g} s"
                why = f"its grammar {late if why == 'late' else f'cannot be compiled: the process was {why}'}"
            raise vllm_requests.ClientError(f"structured outputs: {why}") from error
        except ChildFailed as error:
            why = printable(str(error), 500)
            raise vllm_engine.EngineGenerateError(f"structured outputs cannot be checked: {why}") from error
        self._passed[key] = None
        if len(self._passed) > REMEMBERED:
            self._passed.popitem(last=False)
