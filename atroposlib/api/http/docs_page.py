"""The API's routes as a page, made from its OpenAPI document. The page loads nothing from other hosts, unlike FastAPI's
own, which is empty without internet.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

METHODS = ("get", "post", "put", "patch", "delete")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
section { border-top: 1px solid #8886; padding: .5rem 0; }
h2 { font: 600 1rem ui-monospace, monospace; margin: .3rem 0; } h2 span { display: inline-block; min-width: 4rem; }
p { margin: .3rem 0; } summary { cursor: pointer; }
pre { overflow-x: auto; padding: .5rem; border: 1px solid #8886; border-radius: 4px; }
"""


def add_docs_page(app: FastAPI) -> None:
    """Serve it at /docs. The app has no other."""

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers=HEADERS)


def docs_page(document: Mapping[str, Any]) -> str:
    """An HTML page of an OpenAPI document."""
    title = html.escape(str(document["info"]["title"]))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        f"{_paragraphs(document['info'].get('description', ''))}"
        f"<p><a href=openapi.json>openapi.json</a> is the same for programs.</p>{''.join(_routes(document))}"
        f"<h1>Schemas</h1>{''.join(_schemas(document))}"
    )


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method in methods:
                yield _route(method, path, methods[method])


def _route(method: str, path: str, route: Mapping[str, Any]) -> str:
    parts = [f"<h2><span>{method.upper()}</span>{html.escape(path)}</h2>"]
    parts.append(_paragraphs(route.get("description") or route.get("summary", "")))
    parts += [_parameter(parameter) for parameter in route.get("parameters", [])]
    parts.append(_json("Request body", route.get("requestBody", {}).get("content")))
    for status, reply in route.get("responses", {}).items():
        parts.append(_json(f"{status}: {reply.get('description', '')}", reply.get("content")))
    return f"<section>{''.join(parts)}</section>"


def _parameter(parameter: Mapping[str, Any]) -> str:
    needed = "required" if parameter.get("required") else "optional"
    return f"<p><code>{html.escape(parameter['name'])}</code> ({html.escape(parameter['in'])}, {needed})</p>"


def _schemas(document: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        yield f"<section>{_json(name, schema)}</section>"


def _paragraphs(text: str) -> str:
    escaped = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return "".join(f"<p>{part}</p>" for part in escaped.split("\n\n"))


def _json(title: str, value: object) -> str:
    if not value:
        return ""
    text = html.escape(json.dumps(value, indent=2, ensure_ascii=False))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"
