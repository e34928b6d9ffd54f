"""`atropos-grpo-run`: a vLLM server and the trainer in one command, which share one copy of the weights.

    atropos-grpo-run --model MODEL --training-steps 20        next to a batching API and an environment that run already

    this process ──starts──▶ example_trainer/vllm_api_server.py
         └── then is the trainer, `atropos-grpo --weight-bridge-mode shared_vllm --single-copy`; the server ends with it

Three flags are the server's; all others are the trainer's. `atropos train` also starts the API and the environment.
"""

import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from atroposlib.clients.waiting import Wait, wait_for
from atroposlib.config import load_config
from atroposlib.errors import one_line_errors
from atroposlib.logs import configure_logging, get_logger
from atroposlib.processes.child_group import ChildGroup
from example_trainer.errors import TrainerError
from example_trainer.settings.bridges import SingleCopy
from example_trainer.settings.config import TrainerConfig

log = get_logger(__name__)

PROG = "atropos-grpo-run"
LAUNCHER = Path(__file__).with_name("vllm_api_server.py")
MODE = ["--weight-bridge-mode", "shared_vllm", "--single-copy"]
GRACE_S = 10.0  # from TERM to KILL
POLL_S = 0.5
SERVER_FLAGS = """\
vLLM server that this command starts:
  --gpu-memory-utilization, --vllm-gpu-memory-utilization FRACTION
                        share of the GPU's memory for vLLM (default: 0.45)
  --max-model-len TOKENS
                        longest sequence that vLLM serves (default: 4096)
  --dtype DTYPE         dtype that vLLM serves: bfloat16, float32 or auto (default: float32 on CPUs, else auto)
"""


def main(launcher: Path = LAUNCHER) -> int:
    """The command line: the trainer's exit code, 1 if the server does not start, 2 on wrong flags."""
    server, words = split(sys.argv[1:])
    config = load_config(TrainerConfig, words, prog=PROG, epilog=SERVER_FLAGS)
    configure_logging("run")
    with one_line_errors(PROG):
        words += one_gpu(config.device, os.environ)
        sys.argv[1:] = words  # the trainer's, which reads them again
        with running(command(launcher, server, config), config) as process:
            from example_trainer.commands import grpo  # torch loads while vLLM does

            await_server(process, config)
            return grpo()


def split(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The server's flags, and those of the trainer in this mode."""
    parser = ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--gpu-memory-utilization", "--vllm-gpu-memory-utilization", type=float, default=0.45)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--dtype")
    server, words = parser.parse_known_args(list(argv))
    return server, [*MODE, *words]


def one_gpu(device: str, environment: Mapping[str, str]) -> list[str]:
    """Let vLLM and the trainer see only the GPU of `--device cuda:N`; the trainer's flag for it then."""
    _, _, number = device.partition(":")
    if not number:
        return []
    visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if visible and int(number) >= len(visible):
        raise TrainerError(f"--device {device}: CUDA_VISIBLE_DEVICES={','.join(visible)} leaves {len(visible)} GPU(s)")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number)] if visible else number
    return ["--device", "cuda:0"]


def command(launcher: Path, server: Namespace, config: TrainerConfig) -> list[str]:
    """Return the command that starts the server."""
    words = ["--model", config.model_name, "--port", str(config.vllm_port)]
    words += ["--max-model-len", str(server.max_model_len)]
    words += ["--gpu-memory-utilization", str(server.gpu_memory_utilization)]
    return ["-u", str(launcher), *words, *(["--dtype", server.dtype] if server.dtype else [])]


@contextmanager
def running(words: Sequence[str], config: TrainerConfig) -> Iterator[ChildGroup]:
    """The server, ended with the block. Raises TrainerError where another one could be meant."""
    if not isinstance(config.bridge, SingleCopy):
        raise TrainerError(f"{PROG} trains with a single copy of the weights; for {config.bridge.shown()} start vLLM")
    with suppress(OSError), socket.create_connection((config.vllm_host, config.vllm_port), timeout=5):
        raise TrainerError(
            f"port {config.vllm_port} is in use: choose another --vllm-port, or train with the server there:"
            f" atropos-grpo {' '.join(MODE)}"
        )
    environment = os.environ | {"VLLM_ENABLE_SHARED_WEIGHTS": "1"}
    if config.vllm_api_key is not None:
        environment["VLLM_API_KEY"] = config.vllm_api_key.get_secret_value()
    process = ChildGroup([sys.executable, *words], config.log_dir / "vllm.log", environment)
    log.info("Started vLLM (pid %d, log %s)", process.pid, process.log_path)
    try:
        yield process
    finally:
        process.stop(GRACE_S)


def await_server(process: ChildGroup, config: TrainerConfig) -> None:
    """Return when the server answers. Raises TrainerError once it has ended, or at --vllm-start-timeout."""
    from example_trainer.bridges.vllm_client import vllm_clients

    (client,) = vllm_clients(config)

    def attempt() -> None:
        if (end := process.end()) is not None:
            raise TrainerError(f"vLLM ended: {end}. Last lines of {process.log_path}:\n{process.last_lines()}")
        client.ask_status()

    def late(reason: str) -> TrainerError:
        return TrainerError(
            f"vLLM is not at {client.url} after {config.vllm_start_timeout:.0f} s: {reason}; see {process.log_path},"
            " or raise --vllm-start-timeout"
        )

    wait_for(attempt, Wait("vLLM", client.url, config.vllm_start_timeout, late, POLL_S, POLL_S))


if __name__ == "__main__":
    raise SystemExit(main())
