"""The parameters of /generate, converted from JSON's types to those that vLLM's engine decodes.

The engine process decodes requests strictly, in a thread that dies at the first one that it cannot decode. JSON has no
integer keys and does not distinguish 256 from 256.0, and FastAPI passes a free-form body on unchanged.
"""

import dataclasses
import difflib
import functools
import typing
from typing import Any

import numpy as np

from atroposlib.wire.typed import WrongValue, brief, printable, typed_value
from vllm_patching.compat import vllm_requests
from vllm_patching.engines.base import Refused

LARGEST_BIAS = 100.0  # as in OpenAI's API
# fields of the same structure that vLLM uses internally, besides all names that begin with _
_INTERNAL = {"output_kind", "output_text_buffer_length", "skip_clone"}


def sampling_params(given: dict[str, object]) -> vllm_requests.SamplingParams:
    """vLLM's sampling parameters, from those of a request. Raises Refused for an unknown name, WrongValue for a
    value.
    """
    types = _types()
    for name in given:
        if name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise Refused(f"unknown sampling parameter {brief(name)}{hint}", 422)
    typed = {name: _typed(name, value, types[name]) for name, value in given.items() if value is not None}
    if beyond := [bias for bias in typed.get("logit_bias", {}).values() if abs(bias) > LARGEST_BIAS]:
        raise WrongValue(
            f"logit_bias: expected numbers between -{LARGEST_BIAS:g} and {LARGEST_BIAS:g}, got {beyond[0]:g}"
        )
    typed_value("extra_args.kv_transfer_params", typed.get("extra_args", {}).get("kv_transfer_params"), dict | None)
    try:
        return vllm_requests.SamplingParams(
            **{"max_tokens": None, **typed, "output_kind": vllm_requests.RequestOutputKind.FINAL_ONLY}
        )
    except (ValueError, TypeError, vllm_requests.ClientError) as error:
        raise WrongValue(printable(str(error), 500)) from error


def _typed(name: str, value: object, expected: object) -> Any:
    """Check as `typed_value` does. Also refuses a structure's key that vLLM would ignore or uses internally."""
    for kind in typing.get_args(expected):
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            public = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
            if unknown := sorted(set(value) - public):
                raise WrongValue(f"{name}={brief(value)}: unknown {brief(unknown)}; expected some of {sorted(public)}")
    return typed_value(name, value, expected)


@functools.cache
def _types() -> dict[str, object]:
    """The parameters that a request may have, and their types: those that JSON can express."""
    hints = typing.get_type_hints(vllm_requests.SamplingParams)
    return {
        name: hints[name]
        for name in vllm_requests.SamplingParams.__struct_fields__
        if not name.startswith("_") and name not in _INTERNAL and np.ndarray not in typing.get_args(hints[name])
    }
