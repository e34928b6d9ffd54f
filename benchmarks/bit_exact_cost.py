"""What bit-exactness and exchangeable weights cost: generation and trainer step compared with stock, alternating on the
same cores.

    stock    unmodified vLLM; the trainer without the mode
    server   vLLM with weights that a trainer can exchange, which is what every bridge but restart serves
    exact    the same, batch-invariant, and the exact trainer

    python benchmarks/bit_exact_cost.py --rounds 3

Each arm is a process of its own (the switch must precede vLLM's import); the parent lets one work at a time,
alternating, and takes each arm's best round. Generation: greedy, `--tokens` tokens for each of N prompts. Trainer:
gradient of one packed row, whose answers share their prompts.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.config import Config, load_config
from example_trainer.quickstart_model import cached_model

BATCHES = (8, 32)
ARMS = ("stock", "server", "exact")
ANSWERS = tuple(3 + 3 * answer for answer in range(8))
ROWS = {  # of the trainer: segments, and those that they continue
    "16 sequences of 64 tokens": ((64,) * 16, (-1,) * 16),
    "8 prompts of 17 tokens, 8 answers of 3 to 24 each": (
        (17, *ANSWERS) * 8,
        tuple(parent for prompt in range(8) for parent in (-1, *[9 * prompt] * 8)),
    ),
    "a prompt of 1,000 tokens, 8 answers of 100": ((1000, *[100] * 8), (-1, *[0] * 8)),
}
TASKS = {**dict.fromkeys(ROWS, ("stock", "exact")), **dict.fromkeys(map(str, BATCHES), ARMS)}  # and who does each


class CostConfig(Config):
    """Measure what bit-exactness and exchangeable weights cost."""

    model: str | None = Field(None, description="Hugging Face id or directory; default the quickstart's model")
    rounds: int = Field(3, ge=1, description="rounds per arm")
    tokens: int = Field(32, ge=2, description="tokens to generate per prompt")
    arm: str | None = Field(
        None, pattern="^(stock|server|exact)$", description="internal: run one arm, with commands on stdin"
    )


def serve_arm(config: CostConfig) -> None:
    """Load vLLM and a trainer's model, then answer each line of stdin, a task, with its seconds."""
    exact = config.arm == "exact"
    if exact:
        from vllm_patching.batch_invariant.switch import switch_on

        switch_on(os.environ, cpu=True)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import torch

    from example_trainer.exact.model import make_exact
    from example_trainer.model.cpu_kernels import kernels_of_run, use_kernels
    from example_trainer.model.loading import load_model
    from example_trainer.ranks.ranks import Ranks
    from example_trainer.settings.config import TrainerConfig
    from vllm_patching import worker
    from vllm_patching.compat import vllm_layers, vllm_server

    assert config.model is not None
    if config.arm == "server":
        vllm_layers.keep_plain_linears(worker.linear_for(enforce_eager=True))
    engine = vllm_server.offline_engine(
        config.model, dtype="float32", block_size=32, max_model_len=512, max_num_seqs=64
    )
    model = load_model(config.model, torch.device("cpu"))
    if exact:
        make_exact(model, torch.float32)
    else:
        trainer = TrainerConfig.model_validate({"model_name": config.model})
        use_kernels(model, kernels_of_run(trainer, model, torch.device("cpu"), Ranks(), None))
    print("READY", flush=True)
    for line in sys.stdin:
        task = line.strip()
        seconds = train(model, *ROWS[task]) if task in ROWS else generate(engine, int(task), config.tokens)
        print(f"SECONDS {seconds}", flush=True)


def generate(engine: Any, batch: int, tokens: int) -> float:
    """Seconds for `tokens` greedy tokens of each of `batch` short prompts."""
    from vllm_patching.compat.vllm_requests import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    start = time.perf_counter()
    engine.generate(
        [{"prompt_token_ids": [10 + index, 20, 30, 40]} for index in range(batch)], settings, use_tqdm=False
    )
    return time.perf_counter() - start


def train(model: Any, lengths: tuple[int, ...], parents: tuple[int, ...]) -> float:
    """Seconds for the gradient of one packed row."""
    import torch

    ids = torch.arange(sum(lengths))[None] % 1000
    begins = [0 if parent < 0 else lengths[parent] for parent in parents]
    places = [torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    start = time.perf_counter()
    hidden = model.base_model(
        input_ids=ids,
        position_ids=torch.cat(places)[None],
        packed_lengths=lengths,
        packed_parents=parents if max(parents) >= 0 else None,
        use_cache=False,
    ).last_hidden_state
    logits = model.get_output_embeddings()(hidden[0, ::2])
    logits.log_softmax(-1)[:, 7].sum().backward()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def ask(arm: subprocess.Popen[str], task: str | None, deadline_word: str) -> str:
    """Give an arm a task; its answer after `deadline_word`."""
    assert arm.stdin is not None
    assert arm.stdout is not None
    if task is not None:
        arm.stdin.write(task + "\n")
        arm.stdin.flush()
    for line in arm.stdout:
        if line.startswith(deadline_word):
            return line.removeprefix(deadline_word).strip()
    raise RuntimeError(f"an arm ended: exit code {arm.wait()}")


def measure(config: CostConfig) -> dict[str, dict[str, float]]:
    """Best seconds of each arm for each task."""
    flags = ["--rounds", str(config.rounds), "--tokens", str(config.tokens)]
    command = [sys.executable, str(Path(__file__).resolve()), "--model", str(config.model), *flags, "--arm"]
    arms = {
        name: subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for name in ARMS
    }
    try:
        for arm in arms.values():
            ask(arm, None, "READY")
        best: dict[str, dict[str, float]] = {}
        for task, names in TASKS.items():
            best[task] = dict.fromkeys(names, float("inf"))
            for _ in range(config.rounds + 1):  # the first warms up
                for name in names:
                    best[task][name] = min(best[task][name], float(ask(arms[name], task, "SECONDS")))
        return best
    finally:
        for arm in arms.values():
            arm.kill()
            arm.wait()


def main() -> None:
    """Measure, and print one line per task and the results as JSON."""
    config = load_config(CostConfig, prog="benchmarks/bit_exact_cost.py")
    if config.model is None:
        config = config.model_copy(update={"model": str(cached_model())})
    if config.arm:
        serve_arm(config)
        return
    best = measure(config)
    for batch in BATCHES:
        rate = {name: batch * config.tokens / seconds for name, seconds in best[str(batch)].items()}
        shown = ", ".join(
            f"{name} {tokens:.1f} tokens/s ({tokens / rate['stock']:.2f})" for name, tokens in rate.items()
        )
        print(f"generation, batch {batch}: {shown}")
    for row in ROWS:
        stock, exact = best[row]["stock"], best[row]["exact"]
        print(f"gradient, {row}: stock {stock:.2f} s, exact {exact:.2f} s, ratio {exact / stock:.2f}")
    print(json.dumps(best))


if __name__ == "__main__":
    main()
