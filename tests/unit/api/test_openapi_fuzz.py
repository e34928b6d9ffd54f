"""Requests made from the API's own description: whatever it allows, and what it does not, no reply is a 5xx."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from atroposlib.api.server import create_app

# /events never ends
schema = schemathesis.openapi.from_asgi("/openapi.json", create_app()).exclude(path="/events")


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_described_request_breaks_the_server(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error])
