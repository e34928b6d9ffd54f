"""Settings of an API: where it listens, who may use it, its limits and deadlines. The flags of `run-api`."""

from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from atroposlib.api.token_file import MIN_CHARACTERS, is_usable, read_token
from atroposlib.config import Config
from atroposlib.http_guard import HostName, is_loopback


class RunApiConfig(Config):
    """Where and how the batching API is served."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Other machines can reach it only if it is theirs to reach, e.g. 0.0.0.0.",
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one, which the log names.")
    reload: bool = Field(
        False,
        description=(
            "Restart when the code changes (development): in memory, the queue is lost each time, other flags are"
            " refused."
        ),
    )
    json_logs: bool = Field(False, description="Log one JSON object per line.")

    # --- what outlives a restart -------------------------------------------------------------------------------------
    journal: Path | None = Field(
        None,
        description=(
            "File of accepted groups; by default atropos-api-PORT.db in the working directory, none with --port 0."
        ),
    )
    journal_accept_loss: bool = Field(
        False, description="Start from a damaged journal with what is whole in it; the log tells how much was lost."
    )
    in_memory: bool = Field(False, description="Keep no journal: a restart loses the queue.")

    # --- who may use it ----------------------------------------------------------------------------------------------
    api_token: SecretStr | None = Field(
        None, description="Token that every request must carry.", json_schema_extra={"env": "ATROPOS_API_TOKEN"}
    )
    api_token_file: Path | None = Field(
        None, description="File whose first line is the token; a flag shows in the process list."
    )
    post_token: SecretStr | None = Field(
        None,
        description="Second token, for environments: it opens what they ask for, and nothing else.",
        json_schema_extra={"env": "ATROPOS_POST_TOKEN"},
    )
    post_token_file: Path | None = Field(None, description="File that holds it.")
    allow_unauthenticated: bool = Field(False, description="Listen on an address that others reach, without a token.")
    allowed_host: list[HostName] = Field([], description="A further name that clients call this API by; repeatable.")
    legacy_gets: bool | None = Field(
        None,
        description="Allow GET /batch and GET /reset_data, which change state; by default only the first.",
    )

    # --- limits ------------------------------------------------------------------------------------------------------
    max_body_mb: int = Field(512, ge=1, description="MiB of one request, as sent and decompressed.")
    max_inflight_mb: int = Field(2048, ge=1, description="MiB of all bodies under way; more are answered 503.")
    max_client_mb: int = Field(1024, ge=1, description="MiB of one client's bodies under way; more are answered 429.")
    max_requests_per_second: float = Field(2000.0, gt=0, description="Of one client; more are answered 429.")
    max_connections: int = Field(4096, ge=1, description="Open connections; of more, those that wait are closed.")
    max_environments: int = Field(100_000, ge=1, description="Registered environments; more are answered 429.")
    max_queued_groups: int = Field(200_000, ge=1, description="Groups that wait or are leased; more are answered 429.")
    max_queued_mb: int = Field(
        16_384, ge=1, description="MiB of all groups that wait or are leased; more are answered 429."
    )
    max_sequences: int = Field(65_536, ge=1, description="Sequences of one group.")
    vocab_size: int | None = Field(
        None, ge=1, description="Token ids must be below it; a trainer can register it, too."
    )

    # --- patience ----------------------------------------------------------------------------------------------------
    body_timeout: float = Field(120.0, gt=0, description="Seconds in which a body must be complete.")
    env_timeout: float = Field(
        120.0, gt=0, description="Seconds of silence after which an environment's minimum and weight lapse."
    )
    env_forget: float = Field(3600.0, gt=0, description="Seconds of silence after which an environment is forgotten.")
    trainer_timeout: float = Field(
        120.0, gt=0, description="Seconds of silence after which a trainer's leased batches wait again."
    )
    max_staleness: int | None = Field(None, ge=0, description="Policy versions that a group may be behind the trainer.")
    stale_groups: Literal["drop", "down-weight"] = Field(
        "drop", description="What becomes of groups above --max-staleness."
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
            raise ValueError(f"--in-memory and --journal {self.journal} exclude each other; pick one")
        if not self.max_body_mb <= self.max_client_mb <= self.max_inflight_mb:
            raise ValueError(
                f"a body of --max-body-mb {self.max_body_mb} has to fit into --max-client-mb {self.max_client_mb}, "
                f"and that into --max-inflight-mb {self.max_inflight_mb}: raise the smaller ones"
            )
        if self.posters_token is not None and self.token in (None, self.posters_token):
            raise ValueError("--post-token is a second token beside --api-token, and another one: give both")
        if self.reload and (self.journal, self.token, self.allowed_host, self.legacy_gets) != (None, None, [], None):
            raise ValueError(
                "--reload serves in memory and without a token; leave --journal, --api-token, --allowed-host "
                "and --legacy-gets out"
            )
        if self.token is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} lets other machines in, and no token is set: give --api-token-file FILE (or"
                " ATROPOS_API_TOKEN), or say --allow-unauthenticated"
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
