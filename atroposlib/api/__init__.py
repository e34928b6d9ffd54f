"""The batching API. `app` is the server. It is built on first use, so that sub-modules can be imported alone."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atroposlib.api.server import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from atroposlib.api.server import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
