"""OpenAPI descriptions of handlers that read and write bodies by themselves: schemas come from the wire structures."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi

from atroposlib.wire.routes import Route

Handler = TypeVar("Handler", bound=Callable[..., object])

_REF = "#/components/schemas/{name}"
_described: list[object] = []


def serves(
    router: APIRouter,
    route: Route[Any],
    *,
    method: str | None = None,
    body_required: bool = True,
    headers: Mapping[str, object] | None = None,
) -> Callable[[Handler], Handler]:
    """The decorator of the handler of `route`. `headers` holds the schemas of optional request headers."""
    extra: dict[str, Any] = {"responses": {"200": {"description": "Success", "content": _json(route.reply)}}}
    if route.request is not None:
        extra["requestBody"] = {"required": body_required, "content": _json(route.request)}
        extra["responses"]["422"] = {"description": "The body was refused; `detail` names value and position"}
    if headers is not None:
        extra["parameters"] = [
            {"name": name, "in": "header", "required": False, "schema": schema} for name, schema in headers.items()
        ]
    return router.api_route(route.path, methods=[method or route.method], openapi_extra=extra, response_class=Response)


def _json(record: object) -> dict[str, object]:
    _described.append(record)
    return {"application/json": {"schema": msgspec.json.schema_components([record], ref_template=_REF)[0][0]}}


def with_components(app: FastAPI) -> None:
    """Let the app's OpenAPI document define the structures that its routes refer to."""

    def openapi() -> dict[str, object]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, components = msgspec.json.schema_components(_described, ref_template=_REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
