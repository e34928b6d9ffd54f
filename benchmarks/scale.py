"""The tables of docs/benchmarks/scale.md: how far one batching API, one trainer and one broadcast carry, by arithmetic.

    python -m benchmarks.scale            prints each table
    python -m benchmarks.scale --write    puts them into docs/benchmarks/scale.md

Measured inputs are read from the page; assumptions are the constants below. What fits a GPU is the memory plan's word.
A test compares the page with this program.
"""

import argparse
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import api_throughput
from example_trainer.memory.model_size import ModelSize, published, size_of, weight_shapes
from example_trainer.memory.plan import GB, Serving, Training
from example_trainer.settings.config import TrainerConfig

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks/scale.md"

FLOPS = 989e12  # dense bfloat16 per second of an H100: NVIDIA's data sheet
SHARE = 0.4  # of it that training reaches: assumed
FLOPS_PER_TOKEN = 8  # per weight: forward, backward, and the forward pass again of --gradient-checkpointing
NIC = 40e9  # bytes per second of a 400 Gbit/s card: 50 GB/s by its name, 80 % of that assumed
PCIE = 50e9  # bytes per second to pinned host memory, PCIe 5.0 x16: assumed
GPUS = (8, 256, 1024)
TP = 8  # --tp-size, for models that are too large without
ENVIRONMENT_ASKS_PER_S = 10  # /status-env: TURN_S of atroposlib/envs/commands/serve.py
HEAD_ASKS_PER_S = 0.2  # heartbeats: INTERVAL_S of atroposlib/envs/commands/reporting.py


def _llama_405b() -> ModelSize:
    """The shapes of Llama-3.1-405B."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "num_hidden_layers": 126,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
    }
    shapes = weight_shapes(config)
    assert shapes is not None
    found = size_of(shapes)
    return ModelSize(found.count, found.shapes, found.source, heads=128, kv_heads=8)


MODELS = {
    "1.5B": published("Qwen2.5-1.5B"),
    "7B": published("Qwen2.5-7B"),
    "72B": published("Qwen2.5-72B"),
    "405B": _llama_405b(),
}
FULL = TrainerConfig.model_validate(
    {
        "model_name": "m",
        "offload": "none",
        "gradient_checkpointing": True,
        "bridge": {"kind": "broadcast"},
    }
)


# --- measured inputs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Api:
    """Holds what the page says of benchmarks/api_throughput.py."""

    packed: float  # groups per second posted and fetched in MessagePack, with the journal
    tokens: int  # of a group
    packed_bytes: int
    memory: float  # bytes per byte that waits


def measured_api() -> Api:
    """The last measurement."""
    text = PAGE.read_text()
    load = re.search(r"groups of (\d+) x (\d+) tokens \(", text)
    row = re.search(r"^\| posted and fetched \|(.*)\|$", text, re.M)
    memory = re.search(r"^\| memory by bytes posted \| [\d.]+ \| ([\d.]+) \|", text, re.M)
    assert load
    assert row
    assert memory
    rates = [float(cell.split()[0]) for cell in row[1].split("|")]  # in memory, its MessagePack, journal, its
    settings = api_throughput.Settings(groups=1, sequences=int(load[1]), tokens=int(load[2]))
    (body,) = api_throughput.make_groups(settings)
    packed = len(msgspec.msgpack.encode(msgspec.json.decode(body)))
    return Api(rates[3], int(load[1]) * int(load[2]), packed, float(memory[1]))


def request_seconds() -> float:
    """Seconds of a core that the API takes for one small request, of the largest number of environments measured."""
    rows = re.findall(r"^\| (\d+) \| [\d.]+ s \| (\d+) \| (\d+) % \|", PAGE.read_text(), re.M)
    *_, (_, requests, share) = rows
    return int(share) / 100 / int(requests)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def tokens_per_second(size: ModelSize, gpus: int) -> float:
    """That as many GPUs train on."""
    return gpus * FLOPS * SHARE / (FLOPS_PER_TOKEN * size.count)


def share_of_core(environments: int) -> float:
    """Percent of the API's core that the requests of so many environment servers take beside an idle trainer."""
    return 100 * environments * (ENVIRONMENT_ASKS_PER_S + HEAD_ASKS_PER_S) * request_seconds()


def trainer_fits(size: ModelSize, ranks: int, tp: int = 1, gpu: int = 80) -> bool:
    """Return whether the memory plan accepts full training with this --tp-size, states on the GPUs."""
    if ranks % tp or size.tp_refusal(tp):
        return False
    return Training(FULL.model_copy(update={"tp_size": tp}), size, ranks).need <= gpu * GB


def server_fits(size: ModelSize, ranks: int, gpu: int) -> bool:
    """Return whether the memory plan accepts a vLLM server of so many GPUs, in bfloat16, with staging on the GPUs."""
    serving = Serving(FULL, size, "bfloat16", ranks)
    return serving.least <= serving.share(gpu * GB) * gpu * GB


def least_ranks(size: ModelSize, tp: int = 1) -> int | None:
    """The fewest GPUs of 80 GB, a power of two, that train it with this --tp-size; None where it cannot be split so."""
    return next((ranks for ranks in (1 << power for power in range(15)) if trainer_fits(size, ranks, tp)), None)


# --- tables -----------------------------------------------------------------------------------------------------------


def rounded(value: float) -> str:
    """Two digits and no more: the assumptions carry no third."""
    if value >= 10:
        scale = 10 ** (math.floor(math.log10(value)) - 1)
        return f"{round(value / scale) * scale:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def table(head: list[str], rows: Iterator[list[str]]) -> str:
    """In Markdown; all but the first column to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def demand_table() -> str:
    """Tabulate what trainers ask of it."""
    api = measured_api()
    carried = api.packed * api.tokens

    def cell(size: ModelSize, gpus: int) -> str:
        fits = trainer_fits(size, gpus)
        if not fits and not trainer_fits(size, gpus, TP):
            return "refused"
        asked = tokens_per_second(size, gpus)
        return f"{rounded(asked / 1e6)} ({rounded(100 * asked / carried)} %){'' if fits else '*'}"

    def row(name: str, size: ModelSize) -> list[str]:
        full = carried / tokens_per_second(size, 1)
        return [name, *(cell(size, gpus) for gpus in GPUS), rounded(full)]

    head = ["model", *(f"{gpus:,} GPUs" for gpus in GPUS), "the API is full at GPUs"]
    return table(head, (row(name, size) for name, size in MODELS.items()))


def weight_table() -> str:
    """One policy version, from the trainer to vLLM."""

    def row(name: str, size: ModelSize) -> list[str]:
        nbytes = 2 * size.count
        fits = [
            f"{ranks} x {gpu}"
            for gpu, ranks in ((80, 1), (80, 2), (80, 4), (80, 8), (141, 8), (192, 8), (288, 8))
            if server_fits(size, ranks, gpu)
        ]
        seconds = nbytes / NIC
        return [
            name,
            f"{nbytes / 1e9:,.0f}",
            fits[0] if fits else "refused",
            *(f"{ranks:,}" if (ranks := least_ranks(size, tp)) else "" for tp in (1, TP)),
            *(rounded(seconds * servers) for servers in (1, 8)),
            rounded(nbytes / 8 / PCIE),
        ]

    head = ["model", "GB in bfloat16", "a vLLM server, GPUs x GB"]
    head += ["GPUs of 80 GB that train it", f"with --tp-size {TP}"]
    head += ["1 server, s", "8 servers, s", "host staging, stall, s"]
    return table(head, (row(name, size) for name, size in MODELS.items()))


TABLES: dict[str, Callable[[], str]] = {
    "demand": demand_table,
    "weights": weight_table,
}


def with_tables(page: str) -> str:
    """The page with every table as computed now. Raises KeyError for a table that this program does not know."""

    def fresh(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{TABLES[found[2]]()}\n\n<!-- end -->"

    return re.sub(r"(<!-- computed: (\w+) -->)\n.*?<!-- end -->", fresh, page, flags=re.S)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put them into the page instead of printing them")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text()))
        return
    for name, made in TABLES.items():
        print(f"{name}\n\n{made()}\n")


if __name__ == "__main__":
    main()
