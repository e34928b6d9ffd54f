"""Settings of the batching API, which are the flags of `run-api`: addresses, tokens, limits and deadlines."""

from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from atroposlib.api.token_file import MIN_CHARACTERS, is_usable, read_token
from atroposlib.config import Config
from atroposlib.http_guard import HostName, is_loopback

WITH_RELOAD = {"reload", "host", "port", "json_logs", "allow_unauthenticated"}


class RunApiConfig(Config):
    """Serve the batching API: environments post groups, a trainer fetches batches."""

    host: str = Field(
        "127.0.0.1",
        description=(
            "Address to listen on. The default is reachable from this machine only; 0.0.0.0 listens on all addresses."
        ),
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free port, which the log reports.")
    reload: bool = Field(
        False,
        description=(
            "Restart when the code changes (for development). The queue is in memory and each restart loses it; "
            "flags other than --host, --port, --json-logs and --allow-unauthenticated are refused."
        ),
    )
    json_logs: bool = Field(False, description="Log one JSON object per line.")

    # --- what outlives a restart -------------------------------------------------------------------------------------
    journal: Path | None = Field(
        None,
        description=(
            "File for accepted groups; by default atropos-api-PORT.db in the working directory, none with --port 0."
        ),
    )
    journal_accept_loss: bool = Field(
        False,
        description="Start from a damaged journal with the part that is intact; the log reports how much was lost.",
    )
    in_memory: bool = Field(False, description="Keep no journal; a restart loses the queue.")

    # --- who may use it ----------------------------------------------------------------------------------------------
    api_token: SecretStr | None = Field(
        None, description="Token that every request must carry.", json_schema_extra={"env": "ATROPOS_API_TOKEN"}
    )
    api_token_file: Path | None = Field(
        None, description="File whose first line is the token. A token in a flag is visible in the process list."
    )
    post_token: SecretStr | None = Field(
        None,
        description="Second token, for environments. It opens only the routes that environments need.",
        json_schema_extra={"env": "ATROPOS_POST_TOKEN"},
    )
    post_token_file: Path | None = Field(None, description="File whose first line is the post token.")
    allow_unauthenticated: bool = Field(
        False, description="Listen without a token on an address that other machines can reach."
    )
    allowed_host: list[HostName] = Field(
        [], description="Another host name under which clients may address this API; repeatable."
    )
    legacy_gets: bool | None = Field(
        None,
        description="Allow GET /batch and GET /reset_data, which change state; by default only GET /batch.",
    )

    # --- limits ------------------------------------------------------------------------------------------------------
    max_body_mb: int = Field(512, ge=1, description="Largest request in MiB, both as sent and decompressed.")
    max_inflight_mb: int = Field(
        2048, ge=1, description="MiB of all request bodies in progress; further requests get 503."
    )
    max_client_mb: int = Field(
        1024, ge=1, description="MiB of one client's request bodies in progress; further requests get 429."
    )
    max_requests_per_second: float = Field(
        2000.0, gt=0, description="Requests per second of one client; further requests get 429."
    )
    max_connections: int = Field(4096, ge=1, description="Open connections; beyond that, idle ones are closed.")
    max_environments: int = Field(100_000, ge=1, description="Registered environments; further ones get 429.")
    max_queued_groups: int = Field(200_000, ge=1, description="Queued and leased groups; further ones get 429.")
    max_queued_mb: int = Field(16_384, ge=1, description="MiB of all queued and leased groups; further ones get 429.")
    max_sequences: int = Field(65_536, ge=1, description="Limit of sequences in one group.")
    vocab_size: int | None = Field(None, ge=1, description="Upper bound of token ids; a trainer can register it too.")

    # --- patience ----------------------------------------------------------------------------------------------------
    body_timeout: float = Field(120.0, gt=0, description="Seconds within which a request body must be complete.")
    env_timeout: float = Field(
        120.0, gt=0, description="Seconds of silence after which an environment's minimum and weight no longer apply."
    )
    env_forget: float = Field(3600.0, gt=0, description="Seconds of silence after which an environment is forgotten.")
    trainer_timeout: float = Field(
        120.0, gt=0, description="Seconds of silence after which a trainer's leased batches return to the queue."
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Policy versions by which a group may be behind the trainer."
    )
    stale_groups: Literal["drop", "down-weight"] = Field(
        "drop", description="What to do with groups above --max-staleness."
    )

    @field_validator("api_token", "post_token")
    @classmethod
    def _usable(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not is_usable(token.get_secret_value()):
            raise ValueError(f"a token has {MIN_CHARACTERS} or more printable ASCII characters and no space")
        return token

    @model_validator(mode="after")
    def _flags_agree(self) -> "RunApiConfig":
        if self.in_memory and self.journal is not None:
            raise ValueError(f"--in-memory and --journal {self.journal} cannot be combined; pick one")
        if not self.max_body_mb <= self.max_client_mb <= self.max_inflight_mb:
            raise ValueError(
                f"a body of --max-body-mb {self.max_body_mb} must fit into --max-client-mb {self.max_client_mb}, "
                f"and that into --max-inflight-mb {self.max_inflight_mb}: raise the smaller ones"
            )
        if self.posters_token is not None and self.token in (None, self.posters_token):
            raise ValueError("--post-token is a second token: give --api-token too, and let the two differ")
        given = {name for name, field in RunApiConfig.model_fields.items() if getattr(self, name) != field.default}
        if self.reload and (ignored := given - WITH_RELOAD):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(ignored))
            raise ValueError(f"--reload serves in memory, without a token and with the defaults; drop {flags}")
        if self.token is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} lets other machines in, and no token is set: give --api-token-file FILE (or"
                " ATROPOS_API_TOKEN), or pass --allow-unauthenticated"
            )
        return self

    @property
    def token(self) -> str | None:
        """The API's token, wherever it was given. Raises ValueError for a file that has none."""
        return _given(self.api_token, self.api_token_file, "--api-token-file")

    @property
    def posters_token(self) -> str | None:
        """The post token, wherever it was given. Raises ValueError for a file that has none."""
        return _given(self.post_token, self.post_token_file, "--post-token-file")

    def journal_at(self, port: int) -> Path | None:
        """The journal's file for an API that listens on `port`; None is in memory. Nobody finds a random port's
        journal again.
        """
        if self.journal is not None or self.in_memory or self.port == 0:
            return self.journal
        return Path(f"atropos-api-{port}.db")

    @cached_property
    def max_body_bytes(self) -> int:
        return self.max_body_mb * 2**20

    @cached_property
    def max_inflight_bytes(self) -> int:
        return self.max_inflight_mb * 2**20

    @cached_property
    def max_client_bytes(self) -> int:
        return self.max_client_mb * 2**20

    @cached_property
    def max_queued_bytes(self) -> int:
        return self.max_queued_mb * 2**20


def _given(token: SecretStr | None, file: Path | None, flag: str) -> str | None:
    if file is not None:
        return read_token(file, flag)
    return None if token is None else token.get_secret_value()
