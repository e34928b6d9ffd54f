"""One table of routes: the API serves it, and its tokens open what it says."""

import pytest
from fastapi.routing import APIRoute

from atroposlib.api.server import create_app
from atroposlib.wire import routes
from atroposlib.wire.routes import ROUTES
from tests.unit.api.support import api_settings

SERVED = {
    (method, route.path)
    for route in create_app(api_settings(legacy_gets=True)).routes
    if isinstance(route, APIRoute)
    for method in route.methods
}


def test_the_api_serves_every_route_of_the_table_and_no_other_that_clients_ask_for() -> None:
    table = {(route.method, route.path) for route in ROUTES}
    assert len(table) == len(ROUTES)
    assert table <= SERVED
    assert {path for _, path in SERVED - table} == {"/docs", "/metrics", "/reset_data", "/status-env"}


@pytest.mark.parametrize(
    ("route", "sender"),
    [
        (routes.REGISTER, "trainer"),
        (routes.BATCH, "trainer"),
        (routes.DEAD_LETTERS, "trainer"),
        (routes.SCORED_DATA, "environment"),
        (routes.HEARTBEAT, "environment"),
        (routes.READY, "anyone"),
    ],
)
def test_who_may_ask_is_in_the_table(route: routes.Route[object], sender: str) -> None:
    assert route.sender == sender
