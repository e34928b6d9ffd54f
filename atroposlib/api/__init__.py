"""The batching API. `app` is the server; it is built when it is first asked for, so that sub-modules import alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atroposlib.api.server import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from atroposlib.api.server import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
