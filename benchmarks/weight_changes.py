"""What --bridge-delta sends after real steps, and how long that takes, beside a broadcast of all weights.

    python -m benchmarks.weight_changes --model ~/.cache/atropos/SmolLM2-135M-Instruct [--rate 1gbit] [--steps 8]

One real vLLM server in bfloat16, and for each arm a trainer process of its own: a broadcast of everything, and of what
has changed at each learning rate. A step is the gradient of the next token's loss on a piece of this repository's
documentation, another piece each time, clipped to norm 1, and one AdamW update. After the last sync the digest compares
every word. With --rate all of it runs in a network namespace whose loopback is as slow (tc's token bucket).
"""

import example_trainer.openmp  # noqa: F401  isort: skip  as the trainer does

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from atropos_launcher.placement.this_machine import processor
from atroposlib.logs import configure_logging
from benchmarks.shared.vllm_server import free_port, vllm_server
from example_trainer.bridges import make_bridge
from example_trainer.loop.run import keep_weights
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.by_rank import SharedRanks
from example_trainer.weights.load import load_trained
from vllm_patching.version import VERSION

DOCS = Path(__file__).parents[1] / "docs"
TOKENS = 512  # of a step
RATES = (1e-6, 1e-5, 1e-4)
INSIDE = "WEIGHT_CHANGES_INSIDE"  # set in the namespace

Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="local directory or hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="dtype that vLLM serves")
    parser.add_argument("--steps", type=int, default=8, help="of each arm")
    parser.add_argument("--rate", help="of the loopback, as tc takes it, such as 1gbit; by default it is not limited")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # this script as the trainer of one arm
    options = parser.parse_args()
    if options.arm:
        _train(**json.loads(options.arm))
    elif options.rate and INSIDE not in os.environ:
        limit = f"tc qdisc add dev lo root tbf rate {options.rate} burst 1mb latency 50ms"
        command = ["unshare", "-rn", "sh", "-c", f'ip link set lo up && {limit} && exec "$@"', "sh", sys.executable]
        os.execvpe(command[0], [*command, "-m", "benchmarks.weight_changes", *sys.argv[1:]], os.environ | {INSIDE: "1"})
    else:
        configure_logging("benchmark")
        print("\n".join(_page(options, _compare(options))))


def _compare(options: argparse.Namespace) -> dict[str, Rows]:
    """The reports of each arm's syncs, the first of which sends everything."""
    port, found = free_port(), {}
    with vllm_server(options.model, port, ["--dtype", options.dtype]):
        for name, lr, delta in [
            ("everything", RATES[0], False),
            *((f"what has changed, lr {lr:.0e}", lr, True) for lr in RATES),
        ]:
            arm = {"model": options.model, "port": port, "lr": lr, "delta": delta, "steps": options.steps}
            command = [sys.executable, "-m", "benchmarks.weight_changes", "--model", "-", "--arm", json.dumps(arm)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
            found[name] = [json.loads(line) for line in done.stdout.splitlines()]
    return found


def _train(model: str, port: int, lr: float, delta: bool, steps: int) -> None:
    """The trainer of one arm: a report of each sync on stdout. Fails if a word differs in the end."""
    configure_logging("trainer")
    bridge_mode = {"kind": "broadcast", "delta": delta}
    config = TrainerConfig.model_validate({"model_name": model, "vllm_port": port, "bridge": bridge_mode})
    cpu = torch.device("cpu")
    prepared = make_bridge(config)(model, cpu)
    assert not isinstance(prepared.storage, SharedRanks)  # one process trains
    with closing(prepared):
        trained = load_trained(config, model, cpu, prepared.storage)
        with closing(prepared.connect(trained)) as bridge:
            weights = list(trained.model.parameters())
            optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0, fused=True)
            pieces = _pieces(model)

            def update() -> None:
                optimizer.step()

            print(json.dumps(asdict(bridge.sync(0, keep_weights))), flush=True)
            for version in range(1, steps + 1):
                tokens = next(pieces)
                logits = trained.model(input_ids=tokens[None, :-1]).logits[0]
                optimizer.zero_grad()
                cross_entropy(logits, tokens[1:]).backward()
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
                print(json.dumps(asdict(bridge.sync(version, update))), flush=True)
            if wrong := bridge.differing_tensors(steps):
                raise SystemExit(f"vLLM has other words than the trainer in {len(wrong)} tensors, the first {wrong[0]}")


def _pieces(model: str) -> Iterator[torch.Tensor]:
    text = "\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(text)["input_ids"])
    yield from ids.split(TOKENS)


def _page(options: argparse.Namespace, found: dict[str, Rows]) -> Iterator[str]:
    """A table for docs/benchmarks/speed.md."""
    limited = f"loopback limited to {options.rate}" if options.rate else "loopback"
    yield f"Machine: {processor()}, {os.cpu_count()} cores; PyTorch {torch.__version__}, vLLM {VERSION}; {limited}."
    yield ""
    yield "| sent | first step: words changed | MB | last step: words changed | MB | transfer, median (worst) |"
    yield "|---|---|---|---|---|---|"
    for name, (first, *rows) in found.items():
        seconds = [row["transfer_s"] for row in rows]
        cells = [f"{_share(row)} | {row['bytes_moved'] / 1e6:.2f}" for row in (rows[0], rows[-1])]
        yield f"| {name} | {' | '.join(cells)} | {statistics.median(seconds):.2f} s ({max(seconds):.2f} s) |"
        if first["bytes_whole"] is not None:
            yield (
                f"| {name}, before the first step | | {first['bytes_moved'] / 1e6:.2f} | | |"
                f" {first['transfer_s']:.2f} s |"
            )


def _share(row: dict[str, Any]) -> str:
    return "" if row["words_changed"] is None else f"{row['words_changed']:.2%}"


if __name__ == "__main__":
    main()
