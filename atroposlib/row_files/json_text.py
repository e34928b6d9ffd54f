"""The JSON of what authors hand over: plain values, numpy's, dates, enums and dataclasses. NaN and infinity are null.

msgspec writes the bytes. It would write sets, bytes and durations in forms of its own, so only plain values reach it.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date, time
from enum import Enum
from types import NoneType
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET

ATOMS = {str, float, bool, NoneType}
LEAST, MOST = -(2**63), 2**64 - 1  # of an integer that every reader of JSON takes

Default = Callable[[object], object] | None


def encode(value: object, *, default: Default = None, any_keys: bool = False) -> bytes:
    """Return `value` as JSON; `default` gives what stands for a value that is not JSON. `any_keys`: a key may be of
    any plain type, and is written as a text. Raises TypeError.
    """
    try:
        return msgspec.json.encode(_plain(value, default, any_keys))
    except UnicodeEncodeError:
        raise TypeError("str is not valid UTF-8: surrogates not allowed") from None
    except RecursionError:
        raise TypeError("Recursion limit reached") from None


def _plain(value: object, default: Default, any_keys: bool) -> object:
    kind = type(value)
    if kind in ATOMS or (type(value) is int and LEAST <= value <= MOST):
        return value
    if isinstance(value, dict):
        return {_key(key, default, any_keys): _plain(each, default, any_keys) for key, each in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and kind is tuple):
        kinds = set(map(type, value))
        if kinds <= ATOMS or (kinds == {int} and LEAST <= min(value) and max(value) <= MOST):  # of thousands of tokens
            return value
        return [_plain(each, default, any_keys) for each in value]
    simple = _simpler(value)
    if simple is UNSET and default is None:
        big = "Integer exceeds 64-bit range"
        raise TypeError(big if kind is int else f"Type is not JSON serializable: {kind.__name__}")
    return _plain(default(value) if default and simple is UNSET else simple, default, any_keys)


def _simpler(value: object) -> object:
    """Return what JSON has in place of the value, itself to be made plain; UNSET where there is nothing."""
    match value:
        case Enum():
            return value.value
        case str():
            return str.__str__(value)
        case int() if type(value) is not int:
            return int.__int__(value)
        case date() | time():
            return value.isoformat()
        case UUID():
            return str(value)
    if type(value).__module__ == "numpy":
        return _numbers(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value) if not each.name.startswith("_")}
    return UNSET


def _key(key: object, default: Default, any_keys: bool) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    if not any_keys:
        raise TypeError("Dict key must be str")
    plain = _plain(key, default, any_keys)
    if isinstance(plain, (dict, list, tuple)):
        raise TypeError(f"Dict key must be plain: {type(key).__name__}")
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def _numbers(value: Any) -> object:
    """Return the numbers, truth values or dates of numpy's scalar or array; UNSET for one of other values."""
    import numpy as np  # a caller with such a value has loaded it

    match value.dtype.kind:
        case "b" | "i" | "u":
            return value.tolist()
        case "f":  # 0.1 as a float32 is 0.1, not 0.10000000149011612
            short = value.dtype.itemsize < 8
            return (value.astype(np.float32).astype(str).astype(float) if short else value.astype(float)).tolist()
        case "M":
            return value.astype("datetime64[us]").tolist()
    return UNSET
