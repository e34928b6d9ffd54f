"""Replies of HTTP services as JSON, with a log line for those that are errors."""

import logging

import aiohttp

from atroposlib.logs import get_logger

log = get_logger(__name__)


async def parse_http_response(resp: aiohttp.ClientResponse, logger: logging.Logger | None = None) -> object:
    """The JSON of a reply. Raises aiohttp.ClientResponseError for 4xx and 5xx, after logging status and body.

    A 2xx reply that is not JSON raises json.JSONDecodeError or aiohttp.ContentTypeError.
    """
    if not resp.ok:
        # Read first: raise_for_status gives the connection up, and the body with it.
        body = await resp.text(errors="replace")
        (logger or log).error("%s %s replied %d: %s", resp.method, resp.url, resp.status, body[:1000])
    resp.raise_for_status()
    return await resp.json()
