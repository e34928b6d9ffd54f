"""/docs of the API: every route, and nothing from anywhere else."""

import re

from fastapi.testclient import TestClient

from atroposlib.api.http.docs_page import docs_page
from atroposlib.api.server import create_app


def test_docs_show_every_route_and_load_nothing() -> None:
    client = TestClient(create_app(), base_url="http://127.0.0.1")
    reply = client.get("/docs")
    assert reply.status_code == 200
    for path in client.get("/openapi.json").json()["paths"]:
        assert f"</span>{path}</h2>" in reply.text
    assert re.findall(r"(?:src|href)=(\S+?)>", reply.text) == ["openapi.json"]
    assert "<script" not in reply.text
    assert reply.headers["content-security-policy"].startswith("default-src 'none';")


def test_the_pages_that_need_the_internet_are_gone() -> None:
    assert TestClient(create_app(), base_url="http://127.0.0.1").get("/redoc").status_code == 404


def test_texts_are_escaped() -> None:
    hostile = "<script>alert(1)</script>"
    route = {"description": f"`{hostile}`", "responses": {"200": {"description": hostile}}}
    document = {"info": {"title": hostile}, "paths": {f"/{hostile}": {"get": route}}}
    document |= {"components": {"schemas": {hostile: {"title": hostile}}}}
    assert "<script" not in docs_page(document)
