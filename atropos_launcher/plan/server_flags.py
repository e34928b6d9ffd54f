"""Flags of the run's vLLM servers that vLLM, its bridge or the rest of the run could not use: what a server or the
trainer would tell only once the model is loaded.

`atropos train` and `atropos evaluate` ask before anything starts. What vLLM's own parser refuses is vLLM's to tell.
"""

import math
from collections.abc import Iterator

from atropos_launcher.paths import VLLM_PROGRAM
from atropos_launcher.placement.addresses import Site, vllm_flags
from atropos_launcher.run_file.run_file import RunFile
from atropos_launcher.run_file.servers import Tree, tokens_in
from atropos_launcher.run_file.teacher import TEACHER
from atroposlib.flags import ConfigError, nearest
from atroposlib.http_guard import is_loopback
from example_trainer.settings.bridges import MODES, Adapter, Mode
from vllm_patching.compat.vllm_flags import flags_in, installed_flags

ALONE = {  # flags that count what the bridge serves one of
    "pipeline_parallel_size": "give --vllm.tensor-parallel-size",
    "data_parallel_size": "give --vllm.count",
    "api_server_count": "drop it",
}
HERE = ("127.0.0.1", "localhost", "0.0.0.0", "::")  # hosts under which a server answers at 127.0.0.1, too


def expect_usable_flags(run: RunFile, site: Site, bridge: Mode) -> None:
    """Raise ConfigError for a flag of a vLLM server that nobody knows, or that contradicts the run."""
    _expect_known(run)
    for index, server in enumerate(run.servers):
        for why in _refusals(run, site, bridge, index, server):
            raise ConfigError(f"vllm.{why}")


def _expect_known(run: RunFile) -> None:
    """Raise ConfigError for a flag of a vLLM server that neither the installed vLLM nor our launcher of it has. Without
    vLLM nothing is refused.
    """
    servers = {"vllm": run.servers, TEACHER: [run.teacher.flags] if run.teacher else []}
    given = {(section, key) for section, flags in servers.items() for server in flags for key in server}
    theirs = installed_flags() if given else None
    if not theirs:
        return
    known = theirs.union(flags_in(VLLM_PROGRAM))
    for section, key in sorted(given):
        name = key.partition(".")[0]  # compilation_config.mode is a part of a flag
        if name.replace("-", "_") not in known:
            raise ConfigError(f"{section}.{key}: the installed vLLM has no such flag{nearest(name, sorted(known))}")


def _refusals(run: RunFile, site: Site, bridge: Mode, index: int, server: Tree) -> Iterator[str]:
    mode = MODES[run.kind]
    if (model := server.get("model")) not in (None, run.model, site.model):
        yield f"model {model}: `model` at the top of the run decides it, which is {site.model}: give --model"
    if mode.owns_vllm:
        return  # it carries no weights, and the trainer starts it
    for name, remedy in ALONE.items():
        if (_number(server.get(name)) or 1) > 1:
            yield f"{name} {server[name]}: a server that gets weights is one API process and no such parts: {remedy}"
    if not mode.adapters and server.get("quantization") is not None:
        yield f"quantization {server['quantization']}: bridge {mode.shown()} carries unquantised weights only: drop it"
    host = str(server.get("host") or HERE[0])
    if not site.machines.several and (why_not := unreachable(host)):
        yield why_not
    if host in HERE and not is_loopback(host) and not site.environ.get("VLLM_API_KEY"):
        yield f"host {host} lets other machines in, who could replace the weights: set VLLM_API_KEY, or drop it"
    if mode.same_devices and server.get("dtype") == "float16":
        yield f"dtype float16: bridge {mode.shown()} trains float32 or bfloat16 weights: give one of these"
    yield from _of_adapters(mode, bridge, server)
    flags = vllm_flags(run, site, bridge, index)
    fits, most = _number(flags.get("max_num_batched_tokens")) or math.inf, _number(flags.get("max_num_seqs")) or 0
    if fits < most:
        yield (
            f"max_num_batched_tokens {fits} is below max_num_seqs {most}, which vLLM refuses: give {most} or more, or"
            f" --vllm.max-num-seqs {fits}"
        )


def unreachable(host: str) -> str | None:
    """Explain why the run's programs do not reach a service that listens on `host`; None if they do, or for a name."""
    is_address = host.replace(".", "").isdecimal() or ":" in host
    if not is_address or host in HERE:
        return None
    return f"host {host}: the run's programs reach it at {HERE[0]}: drop it, or give 0.0.0.0"


def _of_adapters(mode: type[Mode], bridge: Mode, server: Tree) -> Iterator[str]:
    enabled = server.get("enable_lora")
    if enabled is not None and bool(enabled) != mode.adapters:
        other = "broadcast" if mode.adapters else "lora"
        yield f"enable_lora {str(enabled).lower()}: bridge {mode.shown()} decides it: drop it, or give --bridge {other}"
    rank = _number(server.get("max_lora_rank"))
    if isinstance(bridge, Adapter) and rank is not None and rank < bridge.r:
        yield f"max_lora_rank {rank}: the adapter has rank {bridge.r} (--bridge.r): drop it, or train a smaller one"


def _number(value: object) -> int | None:
    number = None if value is None or isinstance(value, bool) else tokens_in(str(value))
    return number if isinstance(number, int) else None
