"""OpenAPI descriptions of handlers that read and write bodies by themselves: schemas come from the wire structures."""

from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

_REF = "#/components/schemas/{name}"
_described: list[Any] = []


def describe(
    answer: Any = None,
    *,
    body: Any = None,
    body_required: bool = True,
    content: dict[str, str] | None = None,
    headers: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a route decorator: the types of its JSON body and answer, or the answer's `content` in
    words.

    `headers` holds the schemas of optional request headers.
    """
    extra: dict[str, Any] = {
        "responses": {"200": {"description": "Success", "content": _json(_schema(answer, content))}}
    }
    if body is not None:
        extra["requestBody"] = {"required": body_required, "content": _json(_schema(body))}
        extra["responses"]["422"] = {"description": "The body was refused; `detail` names value and position"}
    if headers is not None:
        extra["parameters"] = [
            {"name": name, "in": "header", "required": False, "schema": schema} for name, schema in headers.items()
        ]
    return {"openapi_extra": extra, "response_class": Response}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _schema(of: Any, content: dict[str, str] | None = None) -> dict[str, Any]:
    if content is not None:
        return {"type": "object", "properties": {name: {"description": text} for name, text in content.items()}}
    _described.append(of)
    return msgspec.json.schema_components([of], ref_template=_REF)[0][0]


def with_components(app: FastAPI) -> None:
    """Let the app's OpenAPI document define the structures that its routes refer to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, components = msgspec.json.schema_components(_described, ref_template=_REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
