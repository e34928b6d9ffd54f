"""torchrun for one machine of several: starts this machine's trainer ranks, and reports in one line how they ended.

    python -m example_trainer.ranks.agent --nnodes 2 --node-rank 1 --nproc-per-node 8 \\
        --master-addr 10.0.0.1 --master-port 29500 --rdzv-conf timeout=600 example_trainer/grpo.py --config trainer.yaml

It takes torchrun's flags and differs in two points. It logs that it waits for the other machines, and ends with one
error if they do not come before its deadline (`--rdzv-conf timeout=600`). And its exit status shows whether something
failed on this machine: 70 means that all ranks here lost contact with one elsewhere.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, parse_args

from atroposlib.errors import one_line_errors
from atroposlib.logs import configure_logging, get_logger, print_error
from example_trainer.errors import TrainerError
from example_trainer.ranks.place import LOST, was_ended_by

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run this machine's ranks. Returns the exit status."""
    args = parse_args(sys.argv[1:] if argv is None else [*argv])
    config, program, program_args = config_from_args(args)
    host, size = args.local_addr or platform.node(), config.max_nodes
    configure_logging("trainer agent")
    log.info(
        "Waiting at most %s s for all %d machines to meet at %s; this is machine %d, %s, with %d trainer ranks",
        config.rdzv_configs["timeout"],
        size,
        config.rdzv_endpoint,
        int(args.node_rank) + 1,
        host,
        config.nproc_per_node,
    )
    try:
        with one_line_errors("grpo"):
            _run(config, program, program_args)
    except ChildFailedError as failed:
        return explain(failed.failures, host)
    except SignalException as asked:
        return 128 + int(asked.sigval)
    return 0


def _run(config: LaunchConfig, program: object, program_args: list[str]) -> None:
    try:
        elastic_launch(config, program)(*program_args)  # type: ignore[arg-type]  # a command
    except DistError as error:
        raise TrainerError(
            f"the {config.max_nodes} machines did not meet at {config.rdzv_endpoint} within"
            f" {config.rdzv_configs['timeout']} s: check in the trainer log of each machine that its agent started, and"
            f" that the firewall admits this port ({str(error).splitlines()[0]})"
        ) from error


def explain(failures: Mapping[int, ProcessFailure], host: str) -> int:
    """Print how the ranks here ended, unless they have done so. Returns the exit status."""
    own = {rank: failure for rank, failure in failures.items() if failure.exitcode != LOST}
    if not own:
        return LOST
    rank, first = min(own.items(), key=lambda found: found[1].timestamp)
    if first.exitcode >= 0:  # it has printed its error
        return first.exitcode or 1
    print_error("grpo", f"trainer rank {rank} on {host} {was_ended_by(-first.exitcode)}, pid {first.pid}")
    return 1


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings come with stacks
    sys.exit(main())
