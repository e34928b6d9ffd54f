"""The worker's end of a broadcast by several trainer ranks: a bucket is put together from what each of them holds.

sender 0 ──group 0──▶ large blocks, into their place ┐
                      the others, packed ──scratch──▶├─▶ bucket
sender 1 ──group 1──▶ ...                            ┘
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from atroposlib.wire.bridge import Bucket, Senders
from atroposlib.wire.senders import Message, messages
from vllm_patching import transport


class SeveralSenders:
    """Receives over `groups`, one with each of `senders`."""

    def __init__(self, senders: Senders, groups: list[transport.Groups]) -> None:
        self._senders = senders
        self._groups = groups
        self._scratch: list[torch.Tensor] = []  # flat uint8, of no message
        self._messages: dict[int, list[list[Message]]] = {}  # of a bucket by its start, for each sender

    def begin(self, bucket: Bucket, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to fill `buffer`, flat uint8 [end - start], except for gaps between parameters; what completes it.
        Buckets are completed in the order in which they have begun. Both raise PeerLost, naming the sender.
        """
        under_way: list[list[transport.Transfer]] = []  # of each sender
        packed: list[tuple[Message, torch.Tensor]] = []
        for sender, (groups, carried) in enumerate(zip(self._groups, self._of(bucket), strict=True)):
            targets = []
            for message in carried:
                if message.in_bucket is not None:
                    targets.append(buffer[message.in_bucket])
                else:
                    memory = self._memory(message.nbytes, buffer)
                    packed.append((message, memory))
                    targets.append(memory[: message.nbytes])
            with self._naming(sender):
                under_way.append([transfer for target in targets for transfer in groups.begin(target)])
        return partial(self._complete, bucket, buffer, under_way, packed)

    def _complete(
        self,
        bucket: Bucket,
        buffer: torch.Tensor,
        under_way: list[list[transport.Transfer]],
        packed: list[tuple[Message, torch.Tensor]],
    ) -> None:
        for sender, transfers in enumerate(under_way):
            with self._naming(sender):
                for transfer in transfers:
                    transfer.wait()
        for message, memory in packed:
            unpack(message, memory, bucket, buffer)
            self._scratch.append(memory)

    def _of(self, bucket: Bucket) -> list[list[Message]]:
        if bucket.start not in self._messages:  # the same in every transfer
            self._messages[bucket.start] = [
                messages(bucket, self._senders, sender) for sender in range(self._senders.count)
            ]
        return self._messages[bucket.start]

    def _memory(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        memory = self._scratch.pop() if self._scratch else like[:0]
        return memory if len(memory) >= nbytes else torch.empty(nbytes, dtype=torch.uint8, device=like.device)

    def _naming(self, sender: int) -> AbstractContextManager[None]:
        return transport.naming(f"trainer rank {sender} of {self._senders.count}")


def unpack(message: Message, packed: torch.Tensor, bucket: Bucket, buffer: torch.Tensor) -> None:
    """Copy the pieces of a message, which `packed` begins with, to their places in the bucket's `buffer`."""
    for (tensor, block), place in message.packed():
        dtype = getattr(torch, tensor.dtype)
        whole = buffer[tensor.offset - bucket.start :][: tensor.nbytes].view(dtype).view(tensor.shape)
        part = packed[place].view(dtype).view([len(each) for each in block])
        whole[tuple(slice(each.start, each.stop) for each in block)] = part
