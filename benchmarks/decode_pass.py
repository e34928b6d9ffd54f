"""How long a decode pass of vLLM takes on this processor, beside the matrix products in it.

    python -m benchmarks.decode_pass [--rows 64] [--dtype bfloat16] [--top-p 1] [--stock]

One process holds the engine. Passes of `--rows` requests with different prompts, and the products that one pass has
computed, repeated with the same inputs and packed weights, take turns. A pass is a step of the engine: scheduling, the
model, drawing with log-probabilities, and text. `--stock` leaves out this project's plugins. Prints medians, and the
least of all.
"""

import example_trainer.openmp  # noqa: F401  isort: skip  as the server does

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from atropos_launcher.placement.this_machine import processor
from example_trainer.quickstart_model import cached_model

TOKENS = 24  # of an answer: the first comes with the prompt, the last with the end of all requests
REPETITIONS = 12
TURNS = 8


def start_engine(options: argparse.Namespace) -> Any:
    """Start vLLM in this process, with exchangeable weights as BridgeWorker has them, or stock."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    settings: dict[str, Any] = {}
    if options.stock:
        os.environ["VLLM_PLUGINS"] = ""
    from vllm_patching.compat import vllm_layers, vllm_server

    if not options.stock:
        from vllm_patching import worker

        vllm_layers.keep_plain_linears(worker.linear_for(enforce_eager=True))
        settings["worker_cls"] = "vllm_patching.worker.ProbedWorker"
    model = options.model or str(cached_model())
    return vllm_server.offline_engine(
        model, dtype=options.dtype, block_size=32, max_model_len=256, max_num_seqs=options.rows, **settings
    ).llm_engine


class Products:
    """The matrix products of a pass: recorded while it runs, and computed again."""

    def __init__(self) -> None:
        from vllm_patching.compat.vllm_ops import cpu_kernels

        self._kernels: Any = cpu_kernels()
        self._multiply: Callable[..., Any] = self._kernels.onednn_mm
        self.calls: list[tuple[Any, ...]] = []

    def record(self, step: Callable[[], Any]) -> None:
        """Take the products of one step."""
        self.calls.clear()
        self._kernels.onednn_mm = self._recorded
        try:
            step()
        finally:
            self._kernels.onednn_mm = self._multiply

    def _recorded(self, handler: Any, x: Any, bias: Any) -> Any:
        self.calls.append((handler, x.clone(), bias))
        return self._multiply(handler, x, bias)

    def seconds(self) -> float:
        """Compute them again, one after the other; return how long that took."""
        begun = time.perf_counter()
        for call in self.calls:
            self._multiply(*call)
        return time.perf_counter() - begun


def passes(engine: Any, options: argparse.Namespace, products: Products, numbers: Iterator[int]) -> Iterator[float]:
    """Answer `--rows` requests; yield the seconds of each decode pass but the two that record and end."""
    from vllm_patching.compat.vllm_requests import SamplingParams

    sampled = SamplingParams(max_tokens=TOKENS, top_p=options.top_p, ignore_eos=True, logprobs=0)
    for number, _ in zip(numbers, range(options.rows), strict=False):
        question = [{"role": "user", "content": f"What is {number % 97} + {number % 89}?"}]
        prompt = engine.get_tokenizer().apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        engine.add_request(str(number), prompt, sampled)
    engine.step()
    products.record(engine.step)
    for _ in range(TOKENS - 3):
        begun = time.perf_counter()
        engine.step()
        yield time.perf_counter() - begun
    while engine.has_unfinished_requests():
        engine.step()


def main() -> None:
    """Print what a pass and its products take."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hugging Face id or directory (default: the quickstart's model)")
    parser.add_argument("--rows", type=int, default=64, help="requests that decode together (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: %(default)s")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s, which keeps all tokens")
    parser.add_argument("--stock", action="store_true", help="vLLM without this project's plugins")
    options = parser.parse_args()
    engine, products, numbers = start_engine(options), Products(), count()
    for _ in passes(engine, options, products, numbers):
        pass  # the first turn warms up
    times: list[tuple[list[float], list[float]]] = []
    for _ in range(TURNS):
        whole = list(passes(engine, options, products, numbers))
        times.append((whole, [products.seconds() for _ in range(REPETITIONS)]))
    medians = [(statistics.median(whole), statistics.median(parts)) for whole, parts in times]
    pass_s, product_s = (statistics.median(each) for each in zip(*medians, strict=True))
    ratio = statistics.median(whole / parts for whole, parts in medians)
    least_pass, least_products = (min(map(min, each)) for each in zip(*times, strict=True))
    print(
        f"{processor()}, {options.dtype}, {options.rows} rows, top-p {options.top_p}"
        f"{', stock' if options.stock else ''}: a pass"
        f" {pass_s * 1e3:.1f} ms, its {len(products.calls)} products {product_s * 1e3:.1f} ms: {ratio:.2f} times"
        f" (least {least_pass * 1e3:.1f} and {least_products * 1e3:.1f} ms: {least_pass / least_products:.2f})"
    )


if __name__ == "__main__":
    main()
