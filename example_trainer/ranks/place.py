"""Which of the trainer's ranks this process is, and how a rank takes signals.

    grpo.py --trainer-ranks 2   starts its ranks itself (spawn.py)
    torchrun ... grpo.py        starts them on one machine or several

Rank 0 has resources that must be closed, such as the session with vLLM: Ctrl-C and TERM end it in order. The others
have none, and signals end them at once. Importing this module loads no torch.
"""

import importlib.metadata
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from atroposlib.processes.exec_child import die_with
from atroposlib.processes.exit_words import signal_name
from example_trainer.errors import TrainerError
from example_trainer.settings.bridges import Adapter
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.gpus import visible_gpus

VARIABLE = "ATROPOS_TRAINER_RANK"  # rank, size, port of the store, its socket, pid of the parent
TORCHRUN = "TORCHELASTIC_RUN_ID"
# what torchrun tells its processes; OMP_NUM_THREADS apart
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
INTERFACE = "GLOO_SOCKET_IFNAME"  # on which Gloo listens
CHOSEN = "ATROPOS_CHOSE_GLOO_INTERFACE"  # there where a trainer, and not its user, has set that
LOST = 70  # the exit status of a rank that misses another one, and leaves the explanation to us
ASKING = (signal.SIGINT, signal.SIGTERM)
ORPHAN_S = 10.0  # in which rank 0 ends, once what started it has died
POLL_S = 1.0


@dataclass(frozen=True)
class Place:
    """A process among the trainer's ranks, and among those on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    port: int | None = None  # of the store, on loopback, where this module started the ranks
    listener: int | None = None  # the socket that rank 0 makes the store of
    parent: int | None = None  # where this module started the ranks

    @staticmethod
    def of_this_process() -> "Place":
        """Read the place that torchrun or this module sets; else the process is alone. Raises TrainerError for
        variables that do not fit together.
        """
        if (ours := os.environ.get(VARIABLE)) is not None:
            rank, size, port, listener, parent = map(int, ours.split())
            return Place(rank, size, rank, size, port, listener if rank == 0 else None, parent)
        if not of_torchrun(os.environ):
            return Place()
        numbers = []
        for name, default in (("RANK", ""), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
            if not (text := os.environ.get(name, default)).isdecimal():
                raise TrainerError(
                    f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')} but {name} is {text or 'not set'}: start the "
                    "trainer's ranks with torchrun, which sets both, or unset WORLD_SIZE"
                )
            numbers.append(int(text))
        return Place(*numbers)

    @property
    def started_by_others(self) -> bool:
        """Return whether this is a rank, even if the only one."""
        return VARIABLE in os.environ or of_torchrun(os.environ)

    @property
    def is_on_one_machine(self) -> bool:
        """Return whether all ranks are on one machine."""
        return self.local_size == self.size


def of_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether somebody else started this process as one rank of several: then MASTER_ADDR and MASTER_PORT are
    where the ranks meet, and not where vLLM's workers do.
    """
    return TORCHRUN in environ or environ.get("WORLD_SIZE", "1") != "1"


def own_environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that settings may be read from."""
    return without_ranks(environ) if of_torchrun(environ) else environ


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child that is not a trainer rank, such as a vLLM server: without what makes a process one."""
    dropped = {VARIABLE, CHOSEN, *([INTERFACE] if CHOSEN in environ else [])}
    if of_torchrun(environ):
        dropped |= {*RANK_VARIABLES, *(name for name in environ if name.startswith("TORCHELASTIC_"))}
        # torchrun sets it to 1 for several processes, where nobody else has set it
        if environ.get("LOCAL_WORLD_SIZE", "1") != "1" and environ.get("OMP_NUM_THREADS") == "1":
            dropped.add("OMP_NUM_THREADS")
    return {name: value for name, value in environ.items() if name not in dropped}


# --- before they start ------------------------------------------------------------------------------------------------


def ranks_to_start(config: TrainerConfig) -> int:
    """Count the processes that this one must start; 0 if it is the only one. Raises TrainerError for more than there
    can be.
    """
    ranks = config.trainer_ranks
    if ranks == "auto":
        alone = config.device not in ("auto", "cuda") or config.batch_invariant or not config.bridge.several_ranks
        ranks = ranks_on_cpu(config) if alone else len(_gpus(config)) or ranks_on_cpu(config)
    if ranks == 1 and config.tp_size == 1:
        return 0
    check_ranks(config, ranks)
    gpus = _gpus(config)
    if gpus and len(gpus) < ranks:
        raise too_few_gpus(ranks, len(gpus))
    return ranks


def ranks_on_cpu(config: TrainerConfig) -> int:
    """Return what `--trainer-ranks auto` is where no GPUs are counted: what the other sizes need."""
    return config.tp_size * (config.fsdp_size or 1)


def check_ranks(config: TrainerConfig, size: int, sharded: bool = True) -> None:
    """Raise TrainerError if `size` ranks cannot train as configured. One rank shards in bfloat16 and with offload."""
    tp = config.tp_size
    if size % tp:
        raise TrainerError(
            f"--tp-size {tp} does not divide the {size} trainer rank{'s' if size > 1 else ''}: give --trainer-ranks"
            f" {tp}, or a multiple of it, or --tp-size 1"
        )
    shard = config.fsdp_size or size // tp
    if size > tp and not config.bridge.several_ranks:
        raise TrainerError(
            f"--weight-bridge-mode {config.bridge.typed} trains in vLLM's own memory, with one trainer rank or one per"
            f" vLLM rank, but this trainer has {size} ranks: give --trainer-ranks 1, or set --tp-size and"
            " --trainer-ranks to vLLM's --tensor-parallel-size, or choose another mode"
        )
    if size > 1 and config.batch_invariant:
        raise TrainerError(
            f"--batch-invariant trains on one device, but this trainer has {size} ranks: give --trainer-ranks 1, or"
            " drop the flag"
        )
    if size > 1 and config.device.startswith("cuda:"):
        raise TrainerError(
            f"--device {config.device} is one GPU, but this trainer has {size} ranks, each on a GPU of its own: give"
            " --device cuda, and choose the GPUs by CUDA_VISIBLE_DEVICES"
        )
    if sharded and config.optimizer != "adamw":
        what = f"this trainer has {size} ranks" if size > 1 else "--compute-dtype bfloat16 and --offload shard them"
        raise TrainerError(
            f"--optimizer {config.optimizer} updates whole tensors, and {what}: use adamw, or --trainer-ranks 1"
            " --compute-dtype float32 --offload none"
        )
    if isinstance(config.bridge, Adapter) and tp > 1 and config.bridge.dropout > 0:
        raise TrainerError(
            f"--lora-dropout {config.bridge.dropout:g}: ranks that split a layer (--tp-size {tp}) would drop different"
            " values of one input: give --lora-dropout 0, or --tp-size 1"
        )
    if size // tp % shard:
        fitting = ", ".join(str(each) for each in range(1, size // tp + 1) if size // tp % each == 0)
        many = f"{size} trainer ranks" + (f" / --tp-size {tp}" if tp > 1 else "")
        raise TrainerError(f"--fsdp-size {shard} does not divide the {many}: give one of {fitting}")


def too_few_gpus(ranks: int, gpus: int) -> TrainerError:
    """The error of more ranks on this machine than it has GPUs."""
    return TrainerError(
        f"{ranks} trainer ranks on this machine, but {gpus} visible {'GPU' if gpus == 1 else 'GPUs'}: give as many"
        " ranks as GPUs (--trainer-ranks), or more GPUs (CUDA_VISIBLE_DEVICES)"
    )


def _gpus(config: TrainerConfig) -> list[str]:
    """List the GPUs that ranks would compute on."""
    if config.device == "cpu" or importlib.metadata.version("torch").endswith("+cpu"):
        return []
    return visible_gpus(os.environ)


def was_ended_by(signum: int) -> str:
    """Say of a rank, in the words that follow its name, which signal ended it."""
    hint = " (by the kernel, if memory ran out)" if signum == signal.SIGKILL else ""
    return f"was ended by {signal_name(signum)}{hint}"


# --- in a rank --------------------------------------------------------------------------------------------------------


def begin_rank(place: Place) -> None:
    """Before torch is loaded: take signals as this rank does, and end when what started it does."""
    first = place.rank == 0
    for signum in ASKING:
        signal.signal(signum, _end_in_order if first else signal.SIG_DFL)
    starter = os.getppid() if place.parent is None else place.parent
    if not die_with(starter, signal.SIGTERM if first else signal.SIGKILL):
        raise SystemExit(128 + signal.SIGTERM)
    if first:
        threading.Thread(target=_outlive_briefly, args=(starter,), name="TrainerParent", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)  # spawn.py has blocked them until here


def _end_in_order(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise what closes everything, once: Ctrl-C in a terminal reaches a rank twice, directly and from its parent."""
    ignore_signals()
    if signum == signal.SIGINT and VARIABLE not in os.environ:  # spawn.py prints it for the ranks that it started
        os.write(sys.stderr.fileno(), b"grpo: interrupted\n")
    raise SystemExit(128 + signum)


def ignore_signals() -> None:
    """From now on Ctrl-C and TERM change nothing. Children would inherit SIG_IGN."""
    for signum in ASKING:
        signal.signal(signum, lambda signum, frame: None)


def _outlive_briefly(starter: int) -> None:
    """End a rank 0 that the death of its starter finds where signals cannot interrupt it."""
    while os.getppid() == starter:
        time.sleep(POLL_S)
    time.sleep(ORPHAN_S)
    os.kill(os.getpid(), signal.SIGKILL)
