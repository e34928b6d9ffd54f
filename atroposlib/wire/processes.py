"""Which process is which, for good: on this machine, in this container, not a later one that was given the same pid.

A trainer that shares vLLM's weights must be on the same machine; so each side can see for itself whether the other
still lives.
"""

from typing import Annotated

import msgspec

from atroposlib.wire.typed import Name

Count = Annotated[int, msgspec.Meta(ge=0)]


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of one boot of one machine. Two are the same only if all four agree."""

    boot_id: Name
    pid_namespace: Count
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**22)]  # the kernel's own limit
    started: Count  # clock ticks after the boot

    def same_place(self, other: "Process") -> bool:
        """Return whether a pid means the same to both: same machine since its last boot, same container."""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)
