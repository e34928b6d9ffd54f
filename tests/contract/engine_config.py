"""A program: our launcher up to where vLLM would start its engine, on a GPU that is not there.

    PYTHONPATH=WHEEL:TRITON:. python -m tests.contract.engine_config MODE     (of releases.MODES)

`vllm_api_server.main` runs whole, with vLLM's own parser and plugins; `vllm_server.serve` is replaced by what comes
next in vLLM: the engine's configuration on its CUDA platform, and the worker class that this names. It prints a JSON
object on a line of its own.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.contract import fake_cuda
from tests.contract.releases import MODES


def main(mode: str) -> None:
    """Print what vLLM makes of the launcher's arguments."""
    os.environ["VLLM_ENABLE_SHARED_WEIGHTS"] = "1"
    gpus = 2 if mode == "tp2" else 1
    fake_cuda.install(gpus)
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.device_count = classmethod(lambda cls: gpus)  # vLLM asks PyTorch, whose build has no CUDA
    from example_trainer import vllm_api_server
    from tests.contract.tiny_model import write_model
    from vllm_patching.compat import vllm_server

    with tempfile.TemporaryDirectory() as directory:
        write_model("qwen3", Path(directory) / "model")
        os.environ["VLLM_BRIDGE_CONFIG_PATH"] = f"{directory}/bridge.json"
        vllm_server.serve = lambda args: print(json.dumps(engine_of(args), default=str))
        argv = ["--model", f"{directory}/model", "--max-model-len", "128", "--max-num-seqs", "8", "--port", "0"]
        vllm_api_server.main([*argv, *MODES[mode][0]])


def engine_of(args: Any) -> dict[str, Any]:
    """What decides where and how the engine computes."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_patching import version
    from vllm_patching.batch_invariant.attention import BLOCK
    from vllm_patching.compat import vllm_kernels
    from vllm_patching.endpoint import BridgeEndpoints

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    backend = config.attention_config.backend
    return {
        "vllm": str(version.VERSION),
        "platform": type(current_platform).__name__,
        "compile_mode": int(config.compilation_config.mode),
        "attention": backend and backend.name,
        "block_size": config.cache_config.block_size,
        "dtype": config.model_config.dtype,
        "v2_runner": config.use_v2_model_runner,
        "tp": config.parallel_config.tensor_parallel_size,
        "lora_rank": config.lora_config and config.lora_config.max_lora_rank,
        "worker": worker.__name__,
        "extends_gpu_worker": issubclass(worker, Worker),
        "bridge": "atropos_bridge" in (config.additional_config or {}),
        "endpoints": isinstance(BridgeEndpoints(), EndpointPlugin),
        "why_not_exact": vllm_kernels.why_not_exact_on_cuda(config, BLOCK),
    }


if __name__ == "__main__":
    main(sys.argv[1])
