"""A compressed file of JSON lines, of which every part can be read alone; `zcat` reads the whole.

    4 MiB of text ──▶ one gzip member, whose header says in an extra field (RFC 1952, 2.3.1.1) how long the member and
                      its text are, and how many lines end in it

kept_rows.py writes such files, and the window reads them. A file may come from somebody else: what its headers say is
checked, and a member is never unpacked to more than it says.
"""

import os
import struct
import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import IO, Generic, NamedTuple, TypeVar

SUFFIX = ".gz"
TEXT_BYTES = 4 << 20  # of a member
MAX_MEMBERS = 4096  # 16 GiB of text
HEAD = struct.Struct("<4sIBBH2sHIII")  # of a member, with the extra field
TAIL = struct.Struct("<II")  # CRC-32 and length of the text
MAGIC = b"\x1f\x8b\x08\x04"  # gzip, deflate, with an extra field
FIELD = b"AT"
EXTRA_BYTES, FIELD_BYTES = 16, 12
LEVEL = 1  # the rows are digits, which the fastest level halves
KEPT_BLOCKS, KEPT_TABLES = 8, 64  # unpacked members, and tables of members, that are remembered

T = TypeVar("T")


class Damaged(OSError):
    """The file is not what `pack` writes."""

    def __init__(self, why: str) -> None:
        super().__init__(0, f"it is compressed in another way, or damaged ({why}); zcat may read it")


class Member(NamedTuple):
    """Says where a member lies, and what is in it."""

    at: int
    size: int
    start: int  # of its text, in the text of the whole
    length: int
    lines: int


def pack(text: IO[bytes], packed: IO[bytes]) -> None:
    """Write all of `text` to `packed`. Raises OSError."""
    while block := text.read(TEXT_BYTES):
        deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        body = deflate.compress(block) + deflate.flush()
        size = HEAD.size + len(body) + TAIL.size
        lines = block.count(b"\n")
        packed.write(HEAD.pack(MAGIC, 0, 0, 255, EXTRA_BYTES, FIELD, FIELD_BYTES, size, len(block), lines))
        packed.write(body + TAIL.pack(zlib.crc32(block), len(block)))


class _Recent(Generic[T]):
    """The last few values that were made. Any thread may ask."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[tuple[int, ...], T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, ...], make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


_tables: _Recent[tuple[Member, ...]] = _Recent(KEPT_TABLES)
_texts: _Recent[bytes] = _Recent(KEPT_BLOCKS)


class Packed:
    """The text of an open file. Raises Damaged, OSError."""

    def __init__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._descriptor = descriptor
        self.key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        self._members = _tables.get(self.key, lambda: tuple(_members(descriptor, status.st_size)))
        self._starts = [member.start for member in self._members]
        self.size = sum(member.length for member in self._members)
        self.lines = sum(member.lines for member in self._members)

    def read(self, start: int, count: int) -> bytes:
        """Up to `count` bytes of the text from `start`, fewer only at its end."""
        parts = []
        number = max(0, bisect_right(self._starts, start) - 1)
        while count > 0 and number < len(self._members) and start < self.size:
            member = self._members[number]
            part = self._text(member)[start - member.start : start - member.start + count]
            parts.append(part)
            start, count, number = start + len(part), count - len(part), number + 1
        return b"".join(parts)

    def blocks(self) -> Iterator[bytes]:
        """The text, a member at a time."""
        for member in self._members:
            yield _unpacked(self._descriptor, member)

    def _text(self, member: Member) -> bytes:
        return _texts.get((*self.key, member.at), lambda: _unpacked(self._descriptor, member))


def _members(descriptor: int, file_size: int) -> Iterator[Member]:
    at = start = number = 0
    while at < file_size:
        head = os.pread(descriptor, HEAD.size, at)
        if len(head) < HEAD.size:
            raise Damaged("a header is cut")
        magic, _, _, _, extra, name, field, size, length, lines = HEAD.unpack(head)
        if (magic, extra, name, field) != (MAGIC, EXTRA_BYTES, FIELD, FIELD_BYTES):
            raise Damaged("another header")
        if not HEAD.size + TAIL.size < size <= file_size - at or not 0 < length <= TEXT_BYTES or lines > length:
            raise Damaged("lengths that cannot be")
        number += 1
        if number > MAX_MEMBERS:
            raise Damaged(f"more than {MAX_MEMBERS} members")
        yield Member(at, size, start, length, lines)
        at, start = at + size, start + length


def _unpacked(descriptor: int, member: Member) -> bytes:
    data = os.pread(descriptor, member.size, member.at)
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        text = inflate.decompress(data[HEAD.size : -TAIL.size], member.length)
    except zlib.error as error:
        raise Damaged(str(error)) from None
    if TAIL.unpack(data[-TAIL.size :]) != (zlib.crc32(text), len(text)) or len(text) != member.length:
        raise Damaged("a wrong checksum")
    return text
