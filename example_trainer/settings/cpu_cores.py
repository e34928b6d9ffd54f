"""Sets of CPU cores as people write them, `0-3,8`, and how the processes of a service share one out.

A core is what the kernel schedules on: `taskset -pc $$` shows those that a process may use. The launcher and the
trainer's configuration use this module; it loads neither torch nor vLLM.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

Cores = tuple[int, ...]  # ascending; of a service without any: it may use all

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse_cores(text: str) -> Cores:
    """`0-3,8` as 0, 1, 2, 3, 8. Raises ValueError."""
    cores: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} names no CPU cores; write e.g. 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} ends before it begins; write {last}-{first}")
        cores += range(first, last + 1)
    return distinct(cores)


def distinct(cores: Sequence[int]) -> Cores:
    """In ascending order. Raises ValueError for a core that is named twice."""
    ordered = sorted(cores)
    if twice := [core for core, following in pairwise(ordered) if core == following]:
        raise ValueError(f"core {twice[0]} is named twice")
    return tuple(ordered)


def shown_cores(cores: Sequence[int]) -> str:
    """`0-3,8`, as the kernel writes it."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def shared_out(cores: Cores, parts: int, what: str) -> list[Cores]:
    """`cores` in as many sets of one size; `what` are their owners, such as "2 trainer ranks". Raises ValueError for a
    number that does not divide.
    """
    each, rest = divmod(len(cores), parts)
    if rest or not each:
        fitting = " or ".join(str(count * parts) for count in (each, each + 1) if count)
        number = f"{len(cores)} CPU core{'' if len(cores) == 1 else 's'}"
        raise ValueError(f"{number} ({shown_cores(cores)}) for {what}: give {fitting}")
    return [cores[index * each : (index + 1) * each] for index in range(parts)]


def expect_cores(cores: Cores, usable: set[int]) -> None:
    """Raise ValueError for a core that this process may not use."""
    if absent := [core for core in cores if core not in usable]:
        raise ValueError(f"CPU core {absent[0]} cannot be used here; available cores are {shown_cores([*usable])}")
