"""`run-api`: serve the batching API. Environments and the trainer find it at http://HOST:PORT.

`run-api journal` looks after the journal (`journal.py`).

The address is bound before anything else starts, so that a taken port is one line and a non-zero exit. One process
only: it owns the queue, and the journal that brings the queue back after a restart.
"""

import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import uvicorn
from pydantic import Field, SecretStr, field_validator, model_validator
from uvicorn.supervisors import ChangeReload

from atroposlib.api.connections import Connection, Connections, Limits, connections_allowed
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.api.token_file import MIN_CHARACTERS, is_usable, read_token
from atroposlib.cli import journal as journal_commands
from atroposlib.config import Config, load_config
from atroposlib.errors import AtroposError, one_line_errors, reaching
from atroposlib.http_guard import HostName, OwnHosts, is_loopback
from atroposlib.logs import configure_logging, get_logger

log = get_logger(__name__)
COMMANDS_HELP = """\
Commands:
  journal    check, copy and export a journal; run-api journal --help lists how
"""


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

    def settings(self) -> ApiSettings:
        """The settings of the app."""
        return ApiSettings(
            token=self.token,
            token_file=self.api_token_file,
            post_token=self.posters_token,
            post_token_file=self.post_token_file,
            hosts=OwnHosts.of(self.host, self.allowed_host),
            legacy_gets=self.legacy_gets,
            max_body_bytes=self.max_body_mb * 2**20,
            max_inflight_bytes=self.max_inflight_mb * 2**20,
            max_client_bytes=self.max_client_mb * 2**20,
            max_requests_per_second=self.max_requests_per_second,
            max_queued_groups=self.max_queued_groups,
            max_queued_bytes=self.max_queued_mb * 2**20,
            max_sequences=self.max_sequences,
            vocab_size=self.vocab_size,
            env_timeout_s=self.env_timeout,
            env_forget_s=max(self.env_forget, self.env_timeout),
            max_environments=self.max_environments,
            trainer_timeout_s=self.trainer_timeout,
            max_staleness=self.max_staleness,
            stale_groups=self.stale_groups,
        )


def _given(token: SecretStr | None, file: Path | None, flag: str) -> str | None:
    if file is not None:
        return read_token(file, flag)
    return None if token is None else token.get_secret_value()


class AddressError(AtroposError):
    """The API cannot listen on the address; the message is one line for whoever chose it."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, one for each address of `host`, all on one port. Raises AddressError."""
    remedy = "use --host 127.0.0.1 or an address of this machine"
    with reaching(f"host {host!r} has no address", AddressError, remedy=remedy):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    refusal: OSError | None = None
    for family, _, _, _, address in found:
        try:
            bound.append(socket.create_server((address[0], port), family=family, backlog=socket.SOMAXCONN))
        except OSError as error:
            refusal = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            bound[-1].set_inheritable(True)
            port = bound[0].getsockname()[1]
    if refusal is not None and (not bound or refusal.errno == errno.EADDRINUSE):
        for listener in bound:
            listener.close()
        raise AddressError(_cannot_listen(host, port, refusal.errno))
    return bound


def _cannot_listen(host: str, port: int, number: int | None) -> str:
    reason = f"cannot listen on {host}:{port}: {os.strerror(number or 0)}"
    if number == errno.EADDRINUSE:
        return f"{reason}; another process has this port: end it, or choose another with --port (0 takes a free one)"
    if number == errno.EACCES:
        return f"{reason}; choose a port above 1023 with --port"
    return f"{reason}; use --host 127.0.0.1 or an address of this machine"


def serve(config: RunApiConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises AddressError, JournalError."""
    sockets = listen(config.host, config.port)
    port = sockets[0].getsockname()[1]
    journal = None if config.reload else config.journal_at(port)
    app = (
        None
        if config.reload
        else create_app(config.settings(), journal=journal, accept_loss=config.journal_accept_loss)
    )
    log.info("Batching API listens on http://%s:%d", config.host, port)
    log.info("Groups are kept in %s", "memory only" if journal is None else journal.absolute())
    if not is_loopback(config.host) and config.token is None:
        log.warning("Whoever reaches %s:%d can read and change everything: no token is set", config.host, port)
    limits = Limits(body_s=config.body_timeout, most=connections_allowed(config.max_connections))
    settings = uvicorn.Config(
        app or "atroposlib.api:app",
        http="auto" if config.reload else partial(Connection, Connections(limits)),  # type: ignore[arg-type]
        ws="none",
        reload=config.reload,
        log_config=None,  # our own format
        log_level="warning",
        access_log=False,  # environments poll several times a second
        timeout_keep_alive=75,  # s; longer than a client pauses between two requests
        timeout_graceful_shutdown=5,  # s
    )
    server = uvicorn.Server(settings)
    if config.reload:
        ChangeReload(settings, target=server.run, sockets=sockets).run()
    else:
        server.run(sockets=sockets)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `run-api` and `python -m atroposlib.cli.run_api`."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["journal"]:
        journal_commands.main(argv[1:])
        return
    config = load_config(RunApiConfig, argv, prog="run-api", epilog=COMMANDS_HELP)
    configure_logging("api", config.json_logs)
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, _end)  # uvicorn finishes the open replies, then passes the signal on to this handler
    with one_line_errors("run-api"):
        serve(config)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    log.info("Batching API ended by %s", signal.Signals(number).name)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
