"""Ours: 24 tokens behind the prompt of each sequence in a step, by vLLM in this process.

    python -m benchmarks.peers.arms.vllm_sampling WORK

Speaks the protocol of `benchmarks/trainer_step.py`. In one process, so that its CPU time is vLLM's.
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.trainer_step import answer

ANSWER_TOKENS = 24
LONGEST = 256  # as in a quickstart
IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def main(work: Path) -> None:
    """Answer each line on stdin by a step."""
    os.environ |= IN_THIS_PROCESS
    from vllm import LLM, SamplingParams, TokensPrompt

    items = json.loads((work / "items.json").read_text())
    prompts = [TokensPrompt(prompt_token_ids=group["tokens"][0][: group["prompt_tokens"]]) for group in items]
    model = LLM(str(work / "model"), dtype="float32", max_model_len=LONGEST, generation_config="vllm")
    group_size = len(items[0]["tokens"])
    sampling = SamplingParams(n=group_size, temperature=1.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        done = model.generate(prompts, sampling, use_tqdm=False)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        if any(len(each.token_ids) != ANSWER_TOKENS for request in done for each in request.outputs):
            raise SystemExit(f"an answer has not {ANSWER_TOKENS} tokens")
        answer(seconds=seconds, cpu_seconds=cpu_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
