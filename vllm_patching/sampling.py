"""The parameters of /generate, typed: what JSON can write becomes what vLLM's engine decodes, or one line says what it should have been.

The engine process decodes a request strictly, in a thread that ends with the first one that it cannot decode. JSON has no integers of
its own and no integer keys, and FastAPI hands a free-form body over as it came.
"""

import dataclasses
import difflib
import functools
import math
import typing
from typing import Any

import msgspec
import numpy as np

from vllm_patching import compat
from vllm_patching.replies import Refused, brief

INT64 = range(-(2**63), 2**63)
LARGEST_BIAS = 100.0  # as in OpenAI's API
MAX_DEPTH = 64  # as deep as vLLM takes a JSON schema
# what vLLM keeps in the same structure for itself, beside all names that begin with _
_INTERNAL = {"output_kind", "output_text_buffer_length", "skip_clone"}


def sampling_params(given: dict[str, Any]) -> compat.SamplingParams:
    """vLLM's sampling parameters out of a request's. Raises Refused: 422 for an unknown name, 400 for a value that is none of its type."""
    types = _types()
    for name in given:
        if name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            raise Refused(
                f"unknown sampling parameter {brief(name)}" + (f"; did you mean {close[0]!r}?" if close else ""), 422
            )
    typed = {name: typed_value(name, value, types[name]) for name, value in given.items() if value is not None}
    if beyond := [bias for bias in typed.get("logit_bias", {}).values() if abs(bias) > LARGEST_BIAS]:
        raise Refused(
            f"logit_bias: expected numbers between -{LARGEST_BIAS:g} and {LARGEST_BIAS:g}, got {beyond[0]:g}", 400
        )
    typed_value("extra_args.kv_transfer_params", typed.get("extra_args", {}).get("kv_transfer_params"), dict | None)
    try:
        return compat.SamplingParams(
            **{"max_tokens": None, **typed, "output_kind": compat.RequestOutputKind.FINAL_ONLY}
        )
    except (ValueError, TypeError, compat.VLLMValidationError) as error:
        raise Refused(brief(error, 500), 400) from error


def typed_value(name: str, value: Any, expected: Any) -> Any:
    """`value` as `expected`, with whole floats taken as integers where those are wanted. Raises Refused with name, value and type."""
    if (fault := _fault(value)) is not None:
        raise Refused(f"{name}={brief(value)}: {fault}", 400)
    if unknown := _unknown_keys(value, expected):
        raise Refused(f"{name}={brief(value)}: unknown {brief(unknown)}", 400)
    try:
        return _convert(value, expected)
    except (
        ValueError,
        TypeError,
        compat.VLLMValidationError,
    ) as error:  # msgspec's, or the verdict of vLLM's own structure
        raise Refused(f"{name}={brief(value)}: {brief(error, 500)}", 400) from error


def _convert(value: Any, expected: Any) -> Any:
    try:
        return msgspec.convert(value, expected, str_keys=True)
    except msgspec.ValidationError:
        return msgspec.convert(_with_whole_floats_as_integers(value), expected, str_keys=True)


def _unknown_keys(value: Any, expected: Any) -> list[str]:
    """Keys that a structure of vLLM's would ignore, or that it keeps for itself."""
    for kind in typing.get_args(expected):
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            return sorted(
                set(value) - {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
            )
    return []


def _with_whole_floats_as_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and int(value) in INT64:
        return int(value)
    if isinstance(value, list):
        return [_with_whole_floats_as_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_whole_floats_as_integers(item) for key, item in value.items()}
    return value


def _fault(value: Any, depth: int = 0) -> str | None:
    """What in `value` neither MessagePack nor any parameter of vLLM's can hold, whatever its type should be."""
    if depth > MAX_DEPTH:
        return f"expected at most {MAX_DEPTH} levels of nesting"
    if isinstance(value, float) and not math.isfinite(value):
        return f"expected finite numbers, got {value}"
    if isinstance(value, int) and value not in INT64:
        return f"expected integers of 64 bits, got {brief(value)}"
    if isinstance(value, str) and not value.isascii() and (bad := _lone_surrogate(value)) is not None:
        return f"expected Unicode text, got the lone surrogate {bad}"
    inner = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        if type(item) is int and item in INT64:  # a prompt has many of them
            continue
        if (fault := _fault(item, depth + 1)) is not None:
            return fault
    return None


def _lone_surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start])
    return None


@functools.cache
def _types() -> dict[str, Any]:
    """What may be given, and as what: nothing that JSON cannot hold."""
    hints = typing.get_type_hints(compat.SamplingParams)
    return {
        name: hints[name]
        for name in compat.SamplingParams.__struct_fields__
        if not name.startswith("_") and name not in _INTERNAL and np.ndarray not in typing.get_args(hints[name])
    }
