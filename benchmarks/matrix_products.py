"""How fast this processor multiplies the matrices of a trainer's linear layers, by PyTorch's MKL and by oneDNN.

    python -m benchmarks.matrix_products [--rows 970]

Each row of the table is a shape of weights, each cell the GFLOP/s of one product on one thread: the best of several
calls by CPU time, so that other work disturbs it little. The kernels take turns.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from atropos_launcher.placement.this_machine import processor
from example_trainer.model.cpu_kernels import onednn_product

CALLS = 12
SMOLLM2 = ((1536, 576), (576, 1536), (576, 576))  # (outputs, inputs) of its larger linear layers
Product = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: dict[str, tuple[Product, torch.dtype]] = {
    "MKL": (lambda left, right: left @ right.t(), torch.float32),
    "oneDNN": (onednn_product, torch.float32),
    "oneDNN, bfloat16": (onednn_product, torch.bfloat16),
}


def factors(rows: int, outs: int, ins: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Both factors of each product of a layer with weights [outs, ins], as the trainer hands them over."""
    x, weight, grad = torch.randn(rows, ins), torch.randn(outs, ins), torch.randn(rows, outs)
    return {"output": (x, weight), "gradient of inputs": (grad, weight.t()), "gradient of weights": (grad.t(), x.t())}


def speeds(left: Tensor, right: Tensor) -> list[float]:
    """GFLOP/s of left [m, k] times right [n, k] transposed, by each of PRODUCTS."""
    least = dict.fromkeys(PRODUCTS, float("inf"))
    for nth in range(CALLS + 1):
        for name, (product, dtype) in PRODUCTS.items():
            given = left.to(dtype), right.to(dtype)
            start = time.process_time()
            product(*given)
            if nth:  # the first call warms up
                least[name] = min(least[name], time.process_time() - start)
    return [2 * left.shape[0] * left.shape[1] * right.shape[0] / seconds / 1e9 for seconds in least.values()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=970, help="tokens of a micro-batch (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}, one thread, {options.rows} rows, GFLOP/s\n")
    print(f"| weights | product | {' | '.join(PRODUCTS)} |\n|{'---|' * (2 + len(PRODUCTS))}")
    for outs, ins in SMOLLM2:
        for name, (left, right) in factors(options.rows, outs, ins).items():
            cells = " | ".join(f"{speed:.0f}" for speed in speeds(left, right))
            print(f"| {outs} x {ins} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
