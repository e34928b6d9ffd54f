"""The kernels with which a trainer on a CPU multiplies the matrices of its linear layers. `--kernels` names one, or has
them timed; a checkpoint keeps its run's, so that a resumed run computes the same bits.

    torch      PyTorch's own: MKL on x86
    onednn     oneDNN's in float32: as accurate, other roundings, faster on AMD processors with AVX-512 (measured: 2.2
               times on Zen 5, 1.1 times on Zen 4)
    bfloat16   oneDNN's, of factors rounded to bfloat16; sums are float32, and so is everything else. Its gradients are
               less accurate, so `auto` takes it only where the sampler computes in bfloat16, too

GPUs, the bit-exact mode and a single copy compute as they always do. The learner calls `kernels_of_run` and
`use_kernels`.
"""

import logging
import platform
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atroposlib.errors import reason
from atroposlib.files import expect_regular, write_whole
from atroposlib.logs import get_logger
from example_trainer.errors import TrainerError
from example_trainer.ranks.partition import local
from example_trainer.ranks.ranks import Ranks
from example_trainer.settings.config import Kernels, TrainerConfig

DTYPES = {"onednn": torch.float32, "bfloat16": torch.bfloat16}  # of the factors
SMALLEST = 10_000_000  # weights of linear layers; a smaller model's time is not spent in products
ROWS = 256  # tokens of a timed product
LARGEST = 2048  # inputs and outputs of a timed product; a larger one's time is extrapolated
ROUNDS = (3, 20)  # at least, and at most
LIMIT_S = 2.0  # after which no round follows that is not due
GAIN = 1.03  # by which others must be faster than torch: noise decides nothing
CACHE_BYTES = 1 << 20

CHECKED_ROWS = 150  # tokens of a product whose bits are compared
OF_ATTENTION = (768, 300, 64)  # long sums to few numbers: three heads of a block of exact/functions.py, and their keys
_repeatable = False  # whether gradients of the bit-exact mode must not depend on the number of threads

Shapes = Counter[tuple[int, int]]  # how many layers have (outputs, inputs)

log = get_logger(__name__)


class _Linear(torch.autograd.Function):
    """x [..., in] times weight [out, in] plus bias [out], all float32, by oneDNN with factors in `dtype`."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        product = onednn_product(x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype))
        return (product if bias is None else product.add_(bias)).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        narrow = rows.to(ctx.dtype)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_x = onednn_product(narrow, weight.to(ctx.dtype).t()).view(x.shape)
        if ctx.needs_input_grad[2]:
            columns = x.reshape(-1, x.shape[-1]).to(ctx.dtype).t()
            # measured: in bfloat16, torch's call of oneDNN is the faster one where both factors are transposed
            product = onednn_product if ctx.dtype == torch.float32 else _torch
            of_weight = product(narrow.t(), columns)
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0)
        return None, of_x, of_weight, of_bias


def onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """left [m, k] times right [n, k] transposed, in float32."""
    if left.dtype == torch.bfloat16 and not _has_bfloat16():
        return _torch(left, right)
    product = torch.ops.mkldnn._linear_pointwise(_dense(left), _dense(right), None, "none", [], "")
    return cast(Tensor, product.float())


def _dense(factor: Tensor) -> Tensor:
    """The same without gaps between rows or columns: oneDNN has only a slow loop for others."""
    return factor if factor.is_contiguous() or factor.t().is_contiguous() else factor.contiguous()


def _torch(left: Tensor, right: Tensor) -> Tensor:
    """Multiply as `onednn_product` does, by PyTorch. A processor without AVX-512 multiplies the rounded factors in
    float32, which is a hundred times as fast as PyTorch's own loop over bfloat16, and rounds the result.
    """
    if left.dtype == torch.bfloat16 and not _has_bfloat16():
        return (left.float() @ right.float().t()).bfloat16().float()
    return (left @ right.t()).float()


@cache
def exact_kernels() -> Kernels:
    """Return the kernels with which the bit-exact mode computes gradients, in float32: oneDNN's where measurements
    found them faster, without timing anything, as a run's bits must not depend on a clock; and where
    `take_repeatable_products` was called.
    """
    if _repeatable:
        return "onednn"
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")
    faster = is_amd and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    return "onednn" if faster else "torch"


def take_repeatable_products(model: nn.Module) -> None:
    """Have the bit-exact mode compute gradients by oneDNN on every processor, whose sums do not depend on the number of
    threads (MKL's do). That is measured for the shapes of `model`. Raises TrainerError where it is not so.
    """
    global _repeatable
    if not torch.backends.mkldnn.is_available():
        raise TrainerError("--deterministic computes gradients by oneDNN, which this PyTorch lacks")
    checked = [(CHECKED_ROWS, min(outs, LARGEST), ins) for outs, ins in _shapes(model)]
    for rows, outs, ins in [*checked, OF_ATTENTION]:
        if not _is_repeatable(rows, outs, ins):
            raise TrainerError(
                f"--deterministic: on this machine, gradients of a layer with {ins} inputs and {outs} outputs depend on"
                " the number of threads: drop the flag"
            )
    _repeatable = True
    exact_kernels.cache_clear()


def _is_repeatable(rows: int, outs: int, ins: int) -> bool:
    """Return whether one thread and several compute the same gradients of a layer from that many rows."""
    generator = torch.Generator().manual_seed(outs + ins)
    grad, x = (torch.randn(rows, size, generator=generator) for size in (outs, ins))
    weight = torch.randn(outs, ins, generator=generator)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, max(2, threads)):
            torch.set_num_threads(count)
            found.append((onednn_product(grad.t(), x.t()), onednn_product(grad, weight.t())))
    finally:
        torch.set_num_threads(threads)
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def repeatable() -> bool:
    """Return whether gradients must not depend on the number of threads, nor on where tensors lie in memory."""
    return _repeatable


def exact_product() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the products of `exact_kernels`: left [m, k] times right [n, k] transposed."""
    return onednn_product if exact_kernels() == "onednn" else _torch


def _has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor: from AVX-512 on."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _product(kernels: Kernels) -> Callable[[Tensor, Tensor], Tensor]:
    """left [m, k] times right [n, k] transposed, both float32, by `kernels`."""
    if kernels == "torch":
        return lambda left, right: left @ right.t()
    dtype = DTYPES[kernels]
    return lambda left, right: onednn_product(left.to(dtype), right.to(dtype))


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Have the linear layers of `model` multiply by `kernels` from now on; parameters and names do not change."""
    if kernels != "torch":
        for module in _linears(model):
            module.forward = partial(_forward, module, DTYPES[kernels])


def _forward(module: nn.Linear, dtype: torch.dtype, x: Tensor) -> Tensor:
    weight, bias = local(module.weight), None if module.bias is None else local(module.bias)
    if x.dtype != torch.float32 or weight.dtype != torch.float32:  # the layers compute in another dtype
        return F.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(dtype, x, weight, bias))


def _linears(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def kernels_of_run(
    config: TrainerConfig,
    model: nn.Module,
    device: torch.device,
    ranks: Ranks,
    saved: str | None,
    served_dtype: str = "float32",
) -> Kernels:
    """Choose the kernels of --kernels, or for `auto` those that the checkpoint of a resumed run has `saved`, or the
    fastest. bfloat16 competes where `served_dtype`, in which vLLM computes, is bfloat16. Every rank calls it. Raises
    TrainerError for kernels that this machine does not have.
    """
    here = torch.backends.mkldnn.is_available()
    if config.kernels != "auto":
        if config.kernels != "torch" and (device.type != "cpu" or not here):
            what = f"on CPUs, and this run is on {device}" if here else "by oneDNN, which this PyTorch lacks"
            raise TrainerError(f"--kernels {config.kernels} multiplies {what}: use --kernels torch or auto")
        if saved not in (None, config.kernels):
            log.warning("--kernels %s: the checkpoint's run used %s, so bits differ", config.kernels, saved)
        if config.kernels == "bfloat16" and ranks.leads:
            _report_bfloat16(_shapes(model))
        return config.kernels
    if own := _has_its_own(config, device):
        if saved not in (None, "torch"):
            log.warning("The checkpoint's run used the kernels %s; %s has its own, so bits differ", saved, own)
        return "torch"
    if saved == "torch" or (here and saved in DTYPES):
        return cast(Kernels, saved)
    if saved is not None:
        log.warning("The checkpoint's run used the kernels %r, which are not on this machine: choosing again", saved)
    shapes = _shapes(model)
    candidates: tuple[Kernels, ...] = ("torch", "onednn", *(("bfloat16",) if served_dtype == "bfloat16" else ()))
    chosen: Kernels = "torch"
    if here and _weights(shapes) >= SMALLEST and ranks.leads:
        chosen = fastest(shapes, _cache_of(config), candidates)
    return candidates[int(ranks.largest(torch.tensor(candidates.index(chosen))))]


def _has_its_own(config: TrainerConfig, device: torch.device) -> str | None:
    """Name what computes with kernels of its own; None where there is a choice."""
    return config.follows_vllm if device.type == "cpu" else "a GPU"


def _cache_of(config: TrainerConfig) -> Path:
    try:
        return config.kernel_cache.expanduser()
    except RuntimeError:  # a user without a home directory
        return config.log_dir / config.kernel_cache.name


def _shapes(model: nn.Module) -> Shapes:
    return Counter((module.out_features, module.in_features) for module in _linears(model))


def _weights(shapes: Shapes) -> int:
    return sum(outs * ins * count for (outs, ins), count in shapes.items())


def _report_bfloat16(shapes: Shapes) -> None:
    """Log what rounding gains here: a processor without bfloat16 products emulates them, and is slower with them."""
    if _weights(shapes) < SMALLEST:
        return
    log.info("Timing matrix products of %d shapes, by torch and in bfloat16 (about %g s)", len(shapes), LIMIT_S)
    seconds = timed(shapes, ("torch", "bfloat16"))
    gain = seconds["torch"] / seconds["bfloat16"]
    log.log(
        logging.INFO if gain > 1 else logging.WARNING,
        "Matrix products in bfloat16: %.2f times as fast as in float32%s",
        gain,
        "" if gain > 1 else "; --kernels auto is faster and more accurate here",
    )


def fastest(
    shapes: Shapes,
    cache: Path,
    candidates: tuple[Kernels, ...] = ("torch", "onednn"),
    seconds: Callable[[Shapes, tuple[Kernels, ...]], dict[str, float]] | None = None,
) -> Kernels:
    """The fastest of `candidates`, torch among them, on this machine, as the file `cache` has it or by `seconds`, which
    times them.
    """
    machine = f"{processor()}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    layers = ", ".join(f"{n} x {outs}x{ins}" for (outs, ins), n in sorted(shapes.items()))
    key = f"{'/'.join(candidates)} on {machine}, {layers}"
    known = _read(cache)
    if known.get(key) in candidates:
        log.info("Matrix products by %s, as measured before on this machine (%s)", known[key], cache)
        return known[key]
    log.info("Timing matrix products of %d shapes, by %s (about %g s)", len(shapes), ", ".join(candidates), LIMIT_S)
    start = time.monotonic()
    measured = (seconds or timed)(shapes, candidates)
    least = min(candidates, key=measured.__getitem__)
    chosen: Kernels = least if measured["torch"] > GAIN * measured[least] else "torch"
    log.info(
        "Matrix products by %s: %s as fast as torch (measured in %.1f s, kept in %s)",
        chosen,
        ", ".join(
            f"{name} is {measured['torch'] / measured[name]:.2f} times" for name in candidates if name != "torch"
        ),
        time.monotonic() - start,
        cache,
    )
    try:
        write_whole(cache, msgspec.json.encode({**known, key: chosen}))
    except OSError as error:
        log.warning("%s cannot be written: %s; the next run measures again", cache, reason(error))
    return chosen


def timed(shapes: Shapes, candidates: tuple[Kernels, ...] = ("torch", "onednn")) -> dict[str, float]:
    """CPU seconds that the products of all layers take for ROWS tokens, by each of `candidates`: outputs, gradients of
    inputs and of weights, the least of several rounds in which they take turns. What else runs on a machine falsifies
    CPU seconds less than those of a clock.
    """
    products = {name: _product(name) for name in candidates}
    least: dict[tuple[str, tuple[int, int]], float] = {}
    start = time.monotonic()
    for nth in range(1 + ROUNDS[1]):
        for outs, ins in shapes:
            size, width = min(outs, LARGEST), min(ins, LARGEST)
            weight, x, grad = torch.ones(size, width), torch.ones(ROWS, width), torch.ones(ROWS, size)
            for name, product in products.items():
                before = time.process_time()
                product(x, weight)
                product(grad, weight.t())
                product(grad.t(), x.t())
                spent = (time.process_time() - before) * (outs * ins) / (size * width)
                if nth:  # the first round warms up
                    least[name, (outs, ins)] = min(spent, least.get((name, (outs, ins)), spent))
        if nth >= ROUNDS[0] and time.monotonic() - start > LIMIT_S:
            break
    return {name: sum(least[name, shape] * count for shape, count in shapes.items()) for name in products}


def _read(cache: Path) -> dict[str, Kernels]:
    """Read what earlier runs found; nothing from a file that is not ours."""
    try:
        with expect_regular(cache).open("rb") as file:
            content = file.read(CACHE_BYTES + 1)
        return msgspec.json.decode(content, type=dict[str, Kernels])
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, RecursionError, msgspec.DecodeError) as error:
        log.warning("%s is not what a trainer has written, and is replaced: %s", cache, reason(error))
        return {}


def processor() -> str:
    """Model and stepping, as Linux tells them: virtual machines give several processors one name."""
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0] if cpuinfo.exists() else ""
    told = [line.partition(":") for line in first.splitlines() if line.startswith(("cpu family", "model", "stepping"))]
    return " ".join(value.strip() for _, _, value in told) or platform.machine()
