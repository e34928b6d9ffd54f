"""What authors hand over as JSON: the bytes of each kind of value, and what is refused."""

import enum
import uuid
from collections import Counter, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.row_files.json_text import encode


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    """A subclass of a plain type."""


@dataclass
class Point:
    x: int
    _hidden: int = 0


Pair = namedtuple("Pair", "a b")
LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, -1.5, 1e-7, "é\n\x7f", True, None], '[1,-1.5,1e-7,"é\\n\x7f",true,null]'),
        ([(1, (2,)), {"a": []}], '[[1,[2]],{"a":[]}]'),
        ([float("nan"), -float("inf"), np.float32("nan")], "[null,null,null]"),
        ([2**64 - 1, -(2**63)], "[18446744073709551615,-9223372036854775808]"),
        ([np.float32(0.1), np.float16(0.1), np.float64(0.1)], "[0.1,0.099975586,0.1]"),
        ([np.int64(3), np.uint8(3), np.bool_(True), np.str_("a")], '[3,3,true,"a"]'),
        ([np.ones((1, 2), np.float32) * np.float32(0.1), np.arange(4)[::2]], "[[[0.1,0.1]],[0,2]]"),
        (np.datetime64("2020-01-02"), '"2020-01-02T00:00:00"'),
        (datetime(2020, 1, 2, tzinfo=UTC), '"2020-01-02T00:00:00+00:00"'),
        ([date(2020, 1, 2), time(1, 2, 3)], '["2020-01-02","01:02:03"]'),
        ([Color.RED, Level.LOW, Name("a"), uuid.UUID(int=1)], f'["red",1,"a","{uuid.UUID(int=1)}"]'),
        ([Point(1), Counter("a")], '[{"x":1},{"a":1}]'),
    ],
)
def test_what_is_written(value: Any, text: str) -> None:
    assert encode(value).decode() == text


@pytest.mark.parametrize(
    ("value", "said", "instead"),
    [
        ({1}, "set", '"{1}"'),
        (b"a", "bytes", "\"b'a'\""),
        (timedelta(1), "timedelta", '"1 day, 0:00:00"'),
        (Decimal("1.0"), "Decimal", '"1.0"'),
        (Path("a"), "PosixPath", '"a"'),
        (Pair(1, 2), "Pair", '"Pair(a=1, b=2)"'),
        (np.array(["a", 1], object), "ndarray", "\"['a' 1]\""),
        (1j, "complex", '"1j"'),
        (2**64, "Integer exceeds 64-bit range", '"18446744073709551616"'),
        ([1, 2**64], "Integer exceeds 64-bit range", '[1,"18446744073709551616"]'),
    ],
)
def test_what_is_not_json_is_refused_or_stands_as_a_text(value: Any, said: str, instead: str) -> None:
    with pytest.raises(TypeError, match=f"^(Type is not JSON serializable: )?{said}$"):
        encode([{"a": value}])
    assert encode(value, default=str).decode() == instead


@pytest.mark.parametrize(
    ("value", "said"),
    [("\ud800", "surrogates"), ({"\ud800": 1}, "surrogates"), (LOOP, "Recursion"), ({1: 1}, "key must")],
)
def test_what_nothing_stands_for_is_refused(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        encode(value, default=str)


def test_any_plain_key_is_a_text() -> None:
    keys = {2: 0, 1.5: 0, True: 0, None: 0, Color.RED: 0, date(2020, 1, 2): 0, np.int64(7): 0, Name("a"): 0}
    named = {"2": 0, "1.5": 0, "true": 0, "null": 0, "red": 0, "2020-01-02": 0, "7": 0, "a": 0}
    assert encode(keys, any_keys=True) == encode(named)
    with pytest.raises(TypeError, match="Dict key must be plain: tuple"):
        encode({(1, 2): 1}, any_keys=True)
