"""`run-api journal`: check, copy and export a journal, even while an API writes it.

    run-api journal verify FILE                     read everything, and compare it with the head
    run-api journal backup FILE DESTINATION         a copy that is a complete journal
    run-api journal export FILE [--output LINES]    the groups in it, one JSON object per line
    run-api journal dead-letters FILE [--export LINES]    the groups that could not be trained on

Each command first reads and checks the whole journal, as it is at one moment. For a damaged journal it prints one line
and exits with code 1. It never writes to the journal.
"""

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from atroposlib.api.journal.journal_file import (
    AsFound,
    Body,
    JournalError,
    JournalReader,
    expect_regular_files,
    shm_path,
    wal_path,
)
from atroposlib.api.journal.journal_head import Head, HeadInUse, HeadRecord, head_path, read_head, sync_folder
from atroposlib.api.journal.replay import Replayed, bodies_of, replay
from atroposlib.errors import one_line_errors
from atroposlib.logs import escape


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str]) -> None:
    """Entry point. Exits 1 with one line for a journal that is damaged or cannot be read."""
    parser = _Parser(
        prog="run-api journal", description="Check, copy and export a journal, also while an API writes it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, description in (
        ("verify", _verify, "read all of it and compare it with the journal's head"),
        ("backup", _backup, "write a copy that is a complete journal"),
        ("export", _export, "write the groups in it, one JSON object per line"),
        ("dead-letters", _dead_letters, "list the groups that could not be trained on"),
    ):
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("journal", type=Path, metavar="FILE")
        command.set_defaults(run=run)
        if name == "backup":
            command.add_argument("destination", type=Path)
        elif name != "verify":
            command.add_argument(
                "--output" if name == "export" else "--export",
                dest="output",
                type=Path,
                help="file of JSON lines, which must not exist",
            )
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name is not a failure of a terminal that cannot show it
    with one_line_errors("run-api journal", OSError), _opened(arguments.journal) as (reader, replayed):
        try:
            arguments.run(reader, replayed, arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has closed the pipe


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[JournalReader, Replayed]]:
    expect_regular_files(path)
    found = AsFound(path)
    head = None
    with contextlib.suppress(FileNotFoundError):
        head = read_head(path)  # before the file: an API only adds to it
    try:
        with contextlib.closing(JournalReader(path)) as reader:
            reader.expect(head)
            yield reader, replay(reader)
    finally:
        # a running API owns what is beside the file
        with contextlib.suppress(HeadInUse, OSError), contextlib.closing(Head(path, patience_s=0)):
            found.restore()


# --- commands -------------------------------------------------------------------------------------------------------


def _verify(reader: JournalReader, replayed: Replayed, arguments: argparse.Namespace) -> None:
    sizes = [len(body.data) for body in bodies_of(reader, replayed.state)]
    print(
        f"{reader.path} is intact; changes: {replayed.changes}, newest: {replayed.number}; "
        f"groups: {len(sizes)}, {sum(sizes) / 2**20:.1f} MiB; dead letters: {sum(1 for _ in reader.dead_letters())}"
    )


def _backup(reader: JournalReader, replayed: Replayed, arguments: argparse.Namespace) -> None:
    copy, unfinished = arguments.destination, Path(f"{arguments.destination}.new")
    expect_regular_files(copy)
    for file in (copy, wal_path(copy), shm_path(copy), head_path(copy), unfinished):
        if os.path.lexists(file):
            raise JournalError(f"{file} exists; name another destination, or remove it")
    groups = sum(1 for _ in bodies_of(reader, replayed.state))
    try:
        reader.copy_to(unfinished)
        if reader.id is not None:
            with contextlib.closing(Head(copy, patience_s=0)) as head:
                head.reset(HeadRecord(reader.id, reader.newest))
        unfinished.rename(copy)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(copy)
    print(f"{copy} is written; changes: {replayed.changes}, newest: {replayed.number}; groups: {groups}")


def _private(path: Path) -> IO[bytes]:
    """A new file with prompts and answers, for this user alone."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _export(reader: JournalReader, replayed: Replayed, arguments: argparse.Namespace) -> None:
    environments = replayed.state.queue.environments
    known = {group.record.id: (status, group) for status, group in replayed.state.groups()}
    to_stdout = contextlib.nullcontext(sys.stdout.buffer)
    with to_stdout if arguments.output is None else _private(arguments.output) as lines:
        for body in bodies_of(reader, replayed.state):
            status, group = known[body.id]
            lines.write(
                msgspec.json.encode(
                    {
                        "id": body.id,
                        "status": status,
                        "env_id": group.env_id,
                        "environment": environments[group.env_id].name if group.env_id in environments else None,
                        "rollouts": group.size,
                        "policy_version": group.record.version,
                        "group": _content(body),
                    }
                )
                + b"\n"
            )  # UTF-8 whatever the locale


def _dead_letters(reader: JournalReader, replayed: Replayed, arguments: argparse.Namespace) -> None:
    letters = list(reader.dead_letters())
    for letter in letters:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(letter.at))
        print(f"{letter.body.id}\t{at}\t{escape(str(letter.environment))}\t{escape(letter.reason)}")
    if arguments.output is not None:
        with _private(arguments.output) as lines:
            for letter in letters:
                lines.write(
                    msgspec.json.encode(
                        {
                            "id": letter.body.id,
                            "at": letter.at,
                            "env_id": letter.env_id,
                            "environment": letter.environment,
                            "reason": letter.reason,
                            "group": _content(letter.body),
                        }
                    )
                    + b"\n"
                )


def _content(body: Body) -> object:
    return msgspec.msgpack.decode(body.data) if body.packed else msgspec.Raw(msgspec.json.format(body.data, indent=-1))
