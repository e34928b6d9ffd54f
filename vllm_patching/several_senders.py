"""The worker's end of a broadcast by several trainer ranks: a bucket is put together from what each of them holds.

sender 0 ──group 0──▶ large blocks, into their place ┐
                      the others, packed ──scratch──▶├─▶ bucket
sender 1 ──group 1──▶ ...                            ┘
"""

from contextlib import AbstractContextManager
from datetime import timedelta

import torch

from atroposlib.wire.bridge import Bucket, Senders
from atroposlib.wire.senders import Message, messages
from vllm_patching import transport

LOOK_S = 1.0  # between two looks whether a sender is lost


class SeveralSenders:
    """Of `groups`, one with each of `senders`."""

    def __init__(self, senders: Senders, groups: list[transport.Groups]) -> None:
        self._senders = senders
        self._groups = groups
        self._scratch: dict[int, torch.Tensor] = {}  # of each sender, as large as it was needed
        self._messages: dict[int, list[list[Message]]] = {}  # of a bucket by its start, for each sender

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Fill `buffer`, flat uint8 [end - start], except for gaps between parameters. Raises PeerLost, naming the
        sender.
        """
        under_way: list[tuple[int, transport.Work]] = []
        packed: list[tuple[Message, torch.Tensor]] = []
        for sender, (groups, carried) in enumerate(zip(self._groups, self._of(bucket), strict=True)):
            for message in carried:
                place = message.place(bucket)
                target = buffer[place] if place is not None else self._memory(sender, message.nbytes, buffer)
                if place is None:
                    packed.append((message, target))
                with self._naming(sender):
                    under_way += [(sender, work) for work in groups.begin(target)]
        while under_way:
            sender, work = under_way[0]
            with self._naming(sender):
                done = _done_within(work, LOOK_S)
            if done:
                del under_way[0]
                continue
            for sender, work in under_way:  # one that is lost may not be the one that is waited for
                with self._naming(sender):
                    _ = work.is_completed() and work.wait()
        for message, target in packed:
            unpack(message, target, bucket, buffer)

    def _of(self, bucket: Bucket) -> list[list[Message]]:
        if bucket.start not in self._messages:  # the same in every transfer
            self._messages[bucket.start] = [
                messages(bucket, self._senders, sender) for sender in range(self._senders.count)
            ]
        return self._messages[bucket.start]

    def _memory(self, sender: int, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        if sender not in self._scratch or len(self._scratch[sender]) < nbytes:
            self._scratch[sender] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._scratch[sender][:nbytes]

    def _naming(self, sender: int) -> AbstractContextManager[None]:
        return transport.naming(f"trainer rank {sender} of {self._senders.count}")


def _done_within(work: transport.Work, seconds: float) -> bool:
    """Whether the work is done; waits for that long. Raises what it failed with."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def unpack(message: Message, packed: torch.Tensor, bucket: Bucket, buffer: torch.Tensor) -> None:
    """Copy the pieces of a message to their places in the bucket's `buffer`."""
    for (tensor, block), place in message.packed():
        dtype = getattr(torch, tensor.dtype)
        whole = buffer[tensor.offset - bucket.start :][: tensor.nbytes].view(dtype).view(tensor.shape)
        part = packed[place].view(dtype).view([len(each) for each in block])
        whole[tuple(slice(each.start, each.stop) for each in block)] = part
