"""What our vLLM server reports on the requests of one conversation, which carry its id in the header `X-Session-ID`."""

import hashlib
from collections.abc import Sequence

from msgspec import Struct

SESSION_HEADER = "X-Session-ID"
PREFIX = "/renderers"  # of the routes that the package `renderers` reads
TOKEN_ROUTE = "/inference/v1/generate"
MODELS_ROUTE = "/v1/models"
SESSION_ROUTE = "/v1/sessions"


class Call(Struct):
    """The policy versions of one sampled sequence; as in /generate's reply."""

    sampled: str  # `digest` of its ids
    policy_versions: list[int]
    version_spans: list[list[int]] | None


class SessionCalls(Struct):
    """All that a session has sampled, in the order of the replies."""

    calls: list[Call]


def digest(ids: Sequence[int]) -> str:
    """A name for sampled ids, the same in every process."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]
