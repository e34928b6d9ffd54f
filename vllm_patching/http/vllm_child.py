"""The process that runs vLLM's tool parsers and compiles grammars, each request in a fork that is killed when late.

    {"do": "parse", "parser": "hermes", "text": ..., "tools": []}  ──▶  {"content": ..., "calls": [[name, arguments]]}
    {"do": "compile", "fields": {...}}                             ──▶  {"step_s": 0.0004}

`limited_work.py` starts it with its order as the argument: the tokenizer's name, mode and revision, and the plugin of
--tool-parser-plugin. It has no GPU. `atroposlib/child_processes/forks.py` is its loop.
"""

import json
import sys
import time
from typing import Any

from atroposlib.child_processes.forks import answer_by_forks
from atroposlib.processes.imports import without_garbage_collection

MEMORY_BYTES = 1 << 30  # of one fork, beyond what is loaded
STEPS = 200
STEP_LIMIT_S = 0.05  # of processor time; a step of the whole engine waits for it


class TooSlow(ValueError):
    """A grammar whose steps would hold up the engine."""


def main() -> None:
    order = json.loads(sys.argv[1])
    with without_garbage_collection():
        from vllm_patching.compat import vllm_requests, vllm_server

        tokenizer = vllm_server.load_tokenizer(order["tokenizer"], order["tool_parser_plugin"])

    def answer(request: dict[str, Any]) -> dict[str, object]:
        if request["do"] == "parse":
            content, calls = vllm_server.parse_tool_calls(
                tokenizer, request["parser"], request["text"], request["tools"]
            )
            return {"content": content, "calls": calls}
        grammar = vllm_requests.compile_structured_output(tokenizer, order["vocabulary"], request["fields"])
        return {"step_s": slowest_step(grammar, order["vocabulary"], tokenizer.eos_token_id)}

    answer_by_forks(answer, MEMORY_BYTES)


def slowest_step(grammar: Any, vocabulary: int, stop: int | None) -> float:
    """Processor seconds of the slowest of some steps as the engine makes them, on a text that does not `stop` while it
    may continue. Raises TooSlow: an ambiguous grammar takes longer with every token.
    """
    import torch

    mask, bits = torch.full((1, (vocabulary + 31) // 32), -1, dtype=torch.int32), torch.arange(32, dtype=torch.int32)
    slowest, chance = 0.0, torch.Generator().manual_seed(0)
    for step in range(STEPS):
        if grammar.is_terminated():
            break
        began = time.thread_time()
        grammar.fill_bitmask(mask, 0)
        taken = time.thread_time() - began
        allowed = ((mask[0, :, None] >> bits) & 1).flatten()[:vocabulary].nonzero().flatten()
        going_on = allowed[allowed != stop]
        if not len(going_on):
            break
        token = int(going_on[torch.randint(len(going_on), (1,), generator=chance)])
        began = time.thread_time()
        accepted = grammar.accept_tokens("", [token])
        slowest = max(slowest, taken + time.thread_time() - began)
        if slowest > STEP_LIMIT_S:
            raise TooSlow(
                f"token {step + 1} took {slowest:.2f} s of the engine's own loop; structured outputs take grammars with"
                f" at most {STEP_LIMIT_S:g} s"
            )
        if not accepted:
            break
    return slowest


if __name__ == "__main__":
    main()
