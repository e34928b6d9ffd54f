"""The batching API: `app` is the server, `atroposlib.api.utils` its batching rules as plain functions."""

from atroposlib.api.server import app

__all__ = ["app"]
