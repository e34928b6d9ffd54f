"""Settings of an API: limits, deadlines, who may use it. `run-api` fills them from flags for `create_app`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from atroposlib.http_guard import OwnHosts


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Limits in bytes, groups and seconds; None means no limit."""

    token: str | None = None  # bearer token of every request but /health and /ready
    token_file: Path | None = None  # holds the token in place of `token`, and is followed
    post_token: str | None = None  # opens what an environment asks for, and nothing else
    post_token_file: Path | None = None
    hosts: OwnHosts = field(default_factory=OwnHosts)  # the Host names that it answers to
    legacy_gets: bool | None = None  # GET /batch and GET /reset_data, which change state; None is the former only
    max_body_bytes: int = 512 * 2**20  # of one request, as sent and decompressed
    max_inflight_bytes: int = 2 * 2**30  # of all bodies that are being received and stored
    max_client_bytes: int = 2**30  # of one client's
    max_requests_per_second: float = 2000  # of one client
    max_queued_groups: int = 200_000
    max_queued_bytes: int = 16 * 2**30
    max_sequences: int = 65_536  # of one group
    vocab_size: int | None = None  # token ids are below it; a trainer may register it too
    env_timeout_s: float = 120.0  # without a sign of life from an environment
    env_forget_s: float = 3600.0  # without one until it is forgotten
    max_environments: int = 100_000
    trainer_timeout_s: float = 120.0  # without a sign of life from a trainer that holds batches
    max_staleness: int | None = None  # policy versions
    stale_groups: Literal["drop", "down-weight"] = "drop"
