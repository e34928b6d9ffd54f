"""Nothing that a client sends is answered with 500, whatever came before; and every reply stays readable JSON."""

import gzip
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.api.support import environment, group, registration

pytestmark = pytest.mark.rotating
PATHS = [
    "/register",
    "/register-env",
    "/disconnect-env",
    "/status-env",
    "/scored_data",
    "/scored_data_list",
    "/trainer-step",
    "/evaluation",
]
GETS = [
    "/batch",
    "/status",
    "/info",
    "/wandb_info",
    "/latest_example",
    "/status-env?env_id=0",
    "/evaluations?policy_version=0",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**400, float("nan"), float("inf"), -0.0, 1e308, 5e-324])
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["nan", "1", "1.0", "\ud800", "\x00", "\u2028"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
VALID: dict[str, Any] = {
    "/register": registration(4),
    "/register-env": environment(2),
    "/disconnect-env": {"env_id": 0},
    "/status-env": {"env_id": 0},
    "/scored_data": group(2, env_id=0, messages=[[], []], inference_logprobs=[[1.0, 0.0]] * 2),
    "/scored_data_list": [group(2)],
    "/trainer-step": {"step": 0, "policy_version": 0},
    "/evaluation": {"env_id": 0, "policy_version": 0, "metrics": {"a": 1.0}},
}


@st.composite
def nearly_valid(draw: st.DrawFn) -> tuple[str, Any]:
    """A valid body with one thing in it replaced."""
    path = draw(st.sampled_from(PATHS))
    body = json.loads(json.dumps(VALID[path]))
    node = body[0] if isinstance(body, list) else body
    key: Any = draw(st.sampled_from(sorted(node)))
    while isinstance(node[key], (list, dict)) and node[key] and draw(st.booleans()):
        node = node[key]
        key = draw(st.integers(0, len(node) - 1)) if isinstance(node, list) else draw(st.sampled_from(sorted(node)))
    node[key] = draw(VALUES)
    return path, body


def answered(client: TestClient, path: str, content: bytes, headers: dict[str, str] | None = None) -> None:
    reply = client.post(path, content=content, headers=headers)
    assert reply.status_code < 500, (path, content)
    if reply.headers["content-type"] == "application/json":
        json.loads(reply.content, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    for get in GETS:
        following = client.get(get)
        assert following.status_code < 500
        json.loads(following.content, parse_constant=pytest.fail)


fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(nearly_valid())
def test_no_nearly_valid_body_breaks_the_server(client: TestClient, posted: tuple[str, Any]) -> None:
    path, body = posted
    answered(client, path, json.dumps(body).encode())


@fuzzed
@given(st.sampled_from(PATHS), VALUES)
def test_no_json_breaks_the_server(client: TestClient, path: str, body: Any) -> None:
    answered(client, path, json.dumps(body).encode())


@fuzzed
@given(st.sampled_from(PATHS), st.binary(max_size=60), st.booleans())
def test_no_bytes_break_the_server(client: TestClient, path: str, content: bytes, compressed: bool) -> None:
    answered(client, path, content, {"Content-Encoding": "gzip"} if compressed else None)


@fuzzed
@given(st.sampled_from(PATHS), st.data())
def test_no_cut_of_a_gzipped_body_breaks_the_server(client: TestClient, path: str, data: st.DataObject) -> None:
    packed = gzip.compress(json.dumps(VALID[path]).encode())
    answered(client, path, packed[: data.draw(st.integers(0, len(packed)))], {"Content-Encoding": "gzip"})


@fuzzed
@given(st.sampled_from(["/status-env", "/evaluations"]), st.text(max_size=12) | st.integers().map(str))
def test_no_query_breaks_the_server(client: TestClient, path: str, value: str) -> None:
    reply = client.get(
        path, params={"env_id": value.encode("utf-8", "replace"), "policy_version": value.encode("utf-8", "replace")}
    )
    assert reply.status_code in (200, 404, 422)
