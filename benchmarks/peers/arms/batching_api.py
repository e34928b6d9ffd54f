"""Ours: groups through the batching API, from Python lists to Python lists, by one client.

    python -m benchmarks.peers.arms.batching_api WORK BATCH [JOURNAL]

Encoding and decoding are in the time. With JOURNAL, each post is flushed to that file before its reply.
"""

import sys
import time
from pathlib import Path

import msgspec

from atroposlib.wire.batching import MSGPACK
from benchmarks.api_throughput import Client, registration, served
from benchmarks.trainer_step import answer

ROOT = Path(__file__).parents[3]


def main(work: Path, batch: int, journal: Path | None) -> None:
    """Post every group, fetch every batch, compare."""
    groups = msgspec.json.decode((work / "groups.json").read_bytes())
    sequences, tokens = len(groups[0]["tokens"]), len(groups[0]["tokens"][0])
    with served("api", Path(sys.executable), ROOT, journal) as server:
        client = Client(server.port, "identity", MSGPACK)
        client.post("/register", registration(batch * sequences, tokens))
        start = time.perf_counter()
        for group in groups:
            client.post("/scored_data", msgspec.msgpack.encode(group), MSGPACK)
        posted = time.perf_counter()
        fetched = [msgspec.msgpack.decode(client.get("/batch"))["batch"] for _ in range(len(groups) // batch)]
        end = time.perf_counter()
    if sorted(group["tokens"] for each in fetched for group in each) != sorted(group["tokens"] for group in groups):
        raise SystemExit("the fetched groups are not the posted ones")
    answer(
        groups_per_s=len(groups) / (end - start),
        put_per_s=len(groups) / (posted - start),
        get_per_s=len(groups) / (end - posted),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
