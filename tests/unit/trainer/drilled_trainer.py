"""The trainer, in which one rank meets with an accident: DRILL="RANK WHERE ACT", e.g. "1 gradients KILL".

WHERE is a method of Learner, at its second call; `sending`, in the middle of the second transfer of its rows to vLLM;
`join`, before the ranks have met; or `code`, of which the rank then has another version. ACT is a signal, FREEZE, an
error to raise, or TELL: then every call prints what it returns. DRILL="all transfers MEMORY" harms nobody: each rank
prints what it holds while weights are handed over. With "1 sending SLOW" rank 1 sends for longer than the others.
DRILL_SERVER_PORT is that of a vLLM server, which `sending` waits for. The command line is grpo.py's, and like that
it starts its ranks by its own command.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from example_trainer.before_torch import check_before_torch

if __name__ == "__main__":
    check_before_torch()

from example_trainer import grpo
from example_trainer.bridges.direct import RowSender
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.errors import TrainerError
from example_trainer.loop import learner
from example_trainer.ranks import ranks
from example_trainer.ranks.place import Place
from tests.unit.trainer.process_memory import anonymous_memory

RECEIVING_S = 60.0  # in which a worker begins to receive: Gloo buffers a small send, whose end says nothing of the peer
SLOW_S = 7.0  # that a rank sends for longer than the others
ERRORS = {"TrainerError": TrainerError("drilled"), "ValueError": ValueError("drilled"), "MemoryError": MemoryError()}


def drilled(act: str, method: Callable[..., Any], at_call: int) -> Callable[..., Any]:
    """`method`, which suffers `act` before its call number `at_call`, from 1."""
    if act == "TELL":
        return lambda *arguments: told(method(*arguments))
    calls = 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            if act in ERRORS:
                raise ERRORS[act]
            if act == "FREEZE":
                time.sleep(600)
            print("DRILL", flush=True)
            os.kill(os.getpid(), signal.Signals[f"SIG{act}"])
            time.sleep(0.01)
        return method(*arguments)

    return called


def told(result: Any) -> Any:
    """The result, which is printed: unlike lines of a log, each is."""
    print(f"TOLD {result}", flush=True)
    return result


def drill_sending(act: str) -> None:
    """At the second bucket of the second transfer, once every worker has the first; or at the first if there is no
    second.
    """
    send, transfers = RowSender.send, 0

    def sending(sender: Any, session: str) -> None:
        nonlocal transfers
        transfers += 1
        if transfers == 2 and act != "SLOW":
            joined, begun = sender._joined[session], []
            begin, packed = joined.groups.begin, drilled(act, sender._bytes, min(2, len(joined.messages)))

            def beginning(buffer: Any) -> Any:
                begun.extend(more := begin(buffer))
                return more

            def packing(*arguments: Any) -> Any:
                for transfer in begun:
                    transfer.wait()
                if port := os.environ.get("DRILL_SERVER_PORT"):
                    await_receivers(int(port))
                return packed(*arguments)

            joined.groups.begin, sender._bytes = beginning, packing
        send(sender, session)
        if act == "SLOW":
            time.sleep(SLOW_S)

    setattr(RowSender, "send", sending)  # noqa: B010


def await_receivers(port: int) -> None:
    """Wait until every worker of the server receives what is being sent."""
    vllm = VllmClient("127.0.0.1", port, os.environ["VLLM_API_KEY"], RECEIVING_S)
    deadline = time.monotonic() + RECEIVING_S
    while any(worker.state != "receiving" for worker in vllm.status().workers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the workers of the server at port {port} do not receive within {RECEIVING_S:.0f} s")
        time.sleep(0.05)


def replace(name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have every rank run the changed method of Learner."""
    method = getattr(learner.Learner, name)
    inner = change(method.__wrapped__)
    for attribute in ("__name__", "__annotations__"):
        setattr(inner, attribute, getattr(method, attribute))
    setattr(learner.Learner, name, ranks.collective(inner))


def watch_transfers(until_the_end: ExitStack) -> None:
    """After each call of which a transfer consists, print by how much this rank's anonymous memory has risen at most
    since the first of them.
    """
    seen: list[list[int]] = []

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not seen:
                seen.append(until_the_end.enter_context(anonymous_memory()))
            result = method(*arguments)
            (first, most), rank = seen[0], Place.of_this_process().rank
            line = json.dumps({"rank": rank, "call": method.__name__, "bytes": most - first})
            os.write(1, f"ROSE {line}\n".encode())  # in one piece: the ranks share the file
            return result

        return call

    for name in ("join_senders", "send_rows", "bring_rows"):
        replace(name, watched)


def main() -> int:
    rank, where, act = os.environ["DRILL"].split()
    with ExitStack() as until_the_end:
        if where == "transfers":
            watch_transfers(until_the_end)
        elif Place.of_this_process().rank == int(rank):
            drill(where, act)
        return grpo.main()


def drill(where: str, act: str) -> None:
    """Arrange the accident of this rank."""
    if where == "join":
        setattr(ranks, "_meet", drilled(act, ranks._meet, 1))  # noqa: B010  mypy forbids the assignment
    elif where == "sending":
        drill_sending(act)
    elif where == "code":
        setattr(ranks, "_digest", lambda: "another")  # noqa: B010
    else:
        replace(where, lambda method: drilled(act, method, 2))


if __name__ == "__main__":
    raise SystemExit(main())
