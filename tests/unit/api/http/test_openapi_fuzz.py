"""Requests made from the API's own description: whatever it allows, and what it does not, no reply is a 5xx."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from atroposlib.api.server import create_app

schema = schemathesis.openapi.from_asgi("/openapi.json", create_app())
operations = {found.ok().label: found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)}


# not schema.parametrize: its tests all have one node id, of which xdist runs one
@pytest.mark.rotating
@pytest.mark.parametrize("label", operations)
def test_no_described_request_breaks_the_server(label: str) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operations[label].as_strategy())
    def fuzz(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=[not_a_server_error])

    fuzz()
