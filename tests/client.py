"""The HTTP client of tests: no proxy, a connection of its own for each request, and a deadline for each."""

import httpx

http = httpx.Client(trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
