"""The one file that knows where things are in vLLM 0.26 to 0.33. Loaded only inside vLLM's processes.

Everything else in this package imports vLLM through here, so that a new vLLM release is one diff.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from packaging.version import Version
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RequestOutputKind",
    "RowParallelLinear",
    "SamplingParams",
    "VocabParallelEmbedding",
    "check_version",
    "get_tp_group",
    "init_logger",
    "keep_plain_linears",
    "on_cpu",
    "unlink_collective_files",
    "worker_class",
]

OLDEST = Version("0.26")
BEYOND = Version("0.34")


class UnsupportedVllm(RuntimeError):
    """This vLLM is outside the tested range."""


def check_version() -> None:
    """Raise UnsupportedVllm with the remedy unless vLLM is 0.26 to 0.33."""
    if not OLDEST <= Version(vllm.__version__) < BEYOND:
        raise UnsupportedVllm(
            f"vLLM {vllm.__version__} is outside the supported {OLDEST} <= version < {BEYOND}: install vllm==0.32.0 (scripts/setup.sh does)"
        )


def on_cpu() -> bool:
    return current_platform.is_cpu()


def worker_class() -> type:
    """The platform's own worker, which BridgeWorker extends."""
    if on_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def unlink_collective_files() -> None:
    """Unlink vLLM-CPU's shared-memory files of tensor parallelism once every rank has mapped them; a killed server then leaves none."""
    for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
        path.unlink(missing_ok=True)


def keep_plain_linears() -> None:
    """Make vLLM-CPU call F.linear on `layer.weight` at every step (the one unavoidable shim; CPU only, before the model is loaded).

    Stock vLLM-CPU packs each weight into a oneDNN handle and empties the parameter, so new weights could never reach it. The
    function is looked up in its module at call time, hence one assignment reaches every caller.
    """
    from vllm.model_executor.layers import utils

    packed: Callable[..., None] = utils.dispatch_cpu_unquantized_gemm

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            packed(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def policy_versions(sequence: Any, served: int) -> list[int]:
    """[first, last] policy version one finished sequence was sampled under; `served` is the version at its end."""
    spans = sequence.weight_versions
    return [int(spans[0].version), int(spans[-1].version)] if spans else [served, served]


def parse_serve_arguments(argv: list[str]) -> Any:
    """vLLM's own `serve` arguments, validated. Exits 2 on a wrong flag, raises ValueError on a wrong combination."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser(prog="vllm_api_server.py")).parse_args(argv)
    if args.model_tag is not None:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    return args


def serve(args: Any) -> None:
    """Run vLLM's OpenAI server until a signal ends it."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server

    uvloop.run(run_server(args))
