"""TransferQueue: the same groups through its native client and its default storage, from tensors to tensors.

    python -m benchmarks.peers.arms.transfer_queue WORK BATCH       in an environment with TransferQueue

Making tensors of a sampler's lists is not in the time. A sample is a row; a put has the rows of one group, and a get
those of one batch, by the controller's own order, followed by their removal, as a trainer that has taken them does.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from benchmarks.trainer_step import answer

PARTITION, TASK = "train", "train"
ACTORS = 3  # a controller and two storage units, each of which asks Ray for a CPU: with fewer, tq.init never returns
TYPES = {"tokens": torch.int64, "masks": torch.int64, "inference_logprobs": torch.float32, "scores": torch.float32}


def rows(group: dict[str, Any]) -> TensorDict:
    """A group as tensors, [sequences, tokens] each, but scores [sequences]."""
    fields = {name: torch.tensor(group[name], dtype=dtype) for name, dtype in TYPES.items()}
    return TensorDict(fields, batch_size=len(group["tokens"]))


def main(work: Path, batch: int) -> None:
    """Measure in a Ray cluster of its own, whatever others run here."""
    groups = [rows(group) for group in json.loads((work / "groups.json").read_bytes())]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:  # short: sockets lie in it
        ray.init("local", num_cpus=ACTORS, include_dashboard=False, log_to_driver=False, _temp_dir=own)
        measure(groups, batch)
        ray.shutdown()


def measure(groups: list[TensorDict], batch: int) -> None:
    """Put, get, compare, with the time of each."""
    tq.init()
    client = tq.get_client()
    start = time.perf_counter()
    for group in groups:
        client.put(data=group, partition_id=PARTITION)
    posted = time.perf_counter()
    fetched = []
    for _ in range(len(groups) // batch):
        count = batch * len(groups[0])
        meta = client.get_meta(list(TYPES), count, PARTITION, task_name=TASK)
        fetched.append(client.get_data(meta))
        client.clear_samples(meta)
    end = time.perf_counter()
    sent = sorted(row.tolist() for group in groups for row in group["tokens"])
    if sorted(row.tolist() for data in fetched for row in data["tokens"]) != sent:
        raise SystemExit("the fetched rows are not the ones that were put")
    tq.close()
    answer(
        groups_per_s=len(groups) / (end - start),
        put_per_s=len(groups) / (posted - start),
        get_per_s=len(groups) / (end - posted),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
