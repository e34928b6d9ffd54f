"""The experts that a mixture-of-experts model routed each token to, as one string per sequence.

    ids [tokens, layers, top_k] ──pack──▶ base64 of: layers (uint16), top_k, bytes per id (1 or 2), then the ids
                                                     all little-endian

vLLM's `/generate` writes it, environments carry it along, and the trainer replays it. A sequence of n tokens has n - 1
rows: its last token was sampled and never read. A layer without experts has zeros.
"""

import base64
import binascii
import struct

import numpy as np
from numpy.typing import NDArray

from atroposlib.wire.batching import RoutingShape

_HEAD = struct.Struct("<HBB")


def pack(ids: NDArray[np.integer]) -> str:
    """The string of ids [tokens, layers, top_k]. Raises ValueError for another shape or an id above 65535."""
    if ids.ndim != 3 or not 0 < ids.shape[1] < 2**16 or not 0 < ids.shape[2] < 2**8:
        raise ValueError(f"routed experts of shape {ids.shape} are not [tokens, layers, top_k]")
    highest = int(ids.max(initial=0))
    if highest >= 2**16 or int(ids.min(initial=0)) < 0:
        raise ValueError(f"expert ids from {int(ids.min(initial=0))} to {highest} are not from 0 to 65535")
    width = 1 if highest < 2**8 else 2
    head = _HEAD.pack(ids.shape[1], ids.shape[2], width)
    return base64.b64encode(head + np.ascontiguousarray(ids, dtype=f"<u{width}").tobytes()).decode("ascii")


def unpack(text: str) -> NDArray[np.integer]:
    """The ids of a string, uint8 or uint16 [tokens, layers, top_k], read-only. Raises ValueError for any other
    string.
    """
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ValueError("not base64") from None
    if len(content) < _HEAD.size:
        raise ValueError(f"{len(content)} bytes, fewer than the {_HEAD.size} that describe the ids")
    layers, top_k, width = _HEAD.unpack_from(content)
    if not layers or not top_k or width not in (1, 2):
        raise ValueError(f"{layers} layers, {top_k} experts per token and {width} bytes per id describe no ids")
    size = len(content) - _HEAD.size
    if size % (layers * top_k * width):
        raise ValueError(f"{size} bytes are not whole tokens of {layers} layers x {top_k} experts x {width} bytes")
    return np.frombuffer(content, dtype=f"<u{width}", offset=_HEAD.size).reshape(-1, layers, top_k)


def unpack_for(text: str, tokens: int, shape: RoutingShape) -> NDArray[np.integer]:
    """The ids of a sequence of so many tokens, under a model of this shape. Raises ValueError with value and rule."""
    ids = unpack(text)
    if ids.shape[1:] != shape[:2]:
        raise ValueError(
            f"{ids.shape[1]} layers x {ids.shape[2]} experts per token; the trained model has {shape.layers} x"
            f" {shape.top_k}"
        )
    if len(ids) != tokens - 1:
        raise ValueError(f"rows for {len(ids)} tokens; a sequence of {tokens} needs one for each but the last")
    if len(ids) and int(ids.max()) >= shape.experts:
        raise ValueError(f"expert {int(ids.max())} is not one of the model's {shape.experts}")
    return ids
