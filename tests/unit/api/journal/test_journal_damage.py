"""Damaged and lost journals: every acknowledged group is there after the start, or the start is refused and nothing is
touched.
"""

import hashlib
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from atroposlib.api.journal.journal import Journal
from atroposlib.api.journal.journal_file import JournalDamaged, JournalError, JournalReader
from atroposlib.api.journal.journal_head import SLOT_BYTES, Head, chained, read_head
from atroposlib.api.server import create_app
from atroposlib.api.service import RolloutService
from tests.unit.api.support import DEADLINE_S, api_settings, command, group, marks, register, register_env

GROUPS = 150
TRIES = 12  # of each kind of damage; the nightly form has more
NIGHTLY_TRIES = 400
NOTHING = hashlib.sha256(b"").hexdigest()

Damage = Callable[[Path, random.Random], None]


def filled(
    folder: Path, count: int = GROUPS, before_the_kill: Callable[[Path, sqlite3.Connection], None] | None = None
) -> Path:
    """The files of an API that was killed after it had acknowledged so many groups."""
    path, killed, sizes = folder / "live" / "groups.db", folder / "killed", random.Random(1)
    path.parent.mkdir()
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        for mark in range(count):
            said = [[{"role": "user", "content": "x" * sizes.randrange(6000)}]] * 4
            assert client.post("/scored_data", json=group(4, mark, messages=said)).status_code == 200
        if before_the_kill is not None:
            before_the_kill(path, client.app.state.service.journal._db)  # type: ignore[attr-defined]
        shutil.copytree(path.parent, killed)
    return killed / "groups.db"


def checkpoint(path: Path, db: sqlite3.Connection) -> None:
    """The main file has everything, and the log still does: what is cut from the log then hides newer pages of the
    file.
    """
    assert db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[0] == 0


@pytest.fixture(scope="module", params=[None, checkpoint], ids=["between checkpoints", "after a checkpoint"])
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("journal"), before_the_kill=request.param)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def outcome(path: Path) -> str:
    """`refused`, or how many groups a start finds. A refusal is one line and leaves every byte."""
    before = digests(path.parent)
    try:
        service = RolloutService(api_settings(), Journal(path))
    except JournalError as error:
        line = str(error)
        assert "\n" not in line
        assert digests(path.parent) == before
        return "refused"
    assert service.journal is not None
    service.journal.close()
    return f"{service.state.queue.status().queue_size} groups"


def flip(name: str) -> Damage:
    def damage(path: Path, chance: random.Random) -> None:
        with Path(f"{path}{name}").open("r+b") as file:
            at = chance.randrange(os.fstat(file.fileno()).st_size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))

    return damage


def cut(name: str) -> Damage:
    def damage(path: Path, chance: random.Random) -> None:
        os.truncate(f"{path}{name}", chance.randrange(Path(f"{path}{name}").stat().st_size))

    return damage


def outcomes(killed: Path, folder: Path, damage: Damage, tries: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for seed in range(tries):
        path = folder / str(seed) / killed.name
        shutil.copytree(killed.parent, path.parent)
        damage(path, random.Random(seed))
        result = outcome(path)
        found[result] = found.get(result, 0) + 1
        shutil.rmtree(path.parent)
    return found


DAMAGES = {
    f"{kind.__name__}{name or ' file'}": (kind(name), must_refuse)
    for kind in (flip, cut)
    for name, must_refuse in (("-wal", True), ("", True), (".head", False))
}


@pytest.mark.rotating
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_byte_or_a_cut_loses_no_group_unnoticed(killed: Path, tmp_path: Path, kind: str) -> None:
    damage, must_refuse = DAMAGES[kind]
    found = outcomes(killed, tmp_path, damage, TRIES)
    assert found.keys() <= {"refused", f"{GROUPS} groups"}
    assert found.get("refused", 0) > 0 or not must_refuse


@pytest.mark.nightly
@pytest.mark.parametrize("kind", DAMAGES)
def test_many_damaged_bytes_and_cuts_lose_no_group_unnoticed(killed: Path, tmp_path: Path, kind: str) -> None:
    assert outcomes(killed, tmp_path, DAMAGES[kind][0], NIGHTLY_TRIES).keys() <= {"refused", f"{GROUPS} groups"}


@pytest.fixture
def killed_early(tmp_path: Path) -> Path:
    """A journal whose log holds all of its groups."""
    return filled(tmp_path, count=5)


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [remove, empty])
@pytest.mark.parametrize("name", ["-wal", "", ".head"])
def test_a_file_that_is_removed_or_empty_is_refused(
    killed_early: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(Path(f"{killed_early}{name}"))
    assert outcome(killed_early) == "refused"


def test_an_empty_file_without_anything_beside_it_is_refused(path: Path) -> None:
    path.touch()
    assert outcome(path) == "refused"


def test_a_log_without_its_file_is_refused(killed_early: Path) -> None:
    killed_early.unlink()
    Path(f"{killed_early}.head").unlink()
    assert outcome(killed_early) == "refused"


@pytest.mark.services
def test_the_command_refuses_in_one_line_with_exit_code_1_and_leaves_the_files(killed_early: Path) -> None:
    Path(f"{killed_early}-wal").unlink()
    before = digests(killed_early.parent)
    served = command("--port", "0", "--journal", str(killed_early))
    ended = subprocess.run(served, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert digests(killed_early.parent) == before
    (line,) = ended.stderr.splitlines()
    assert "it ends with change 0" in line
    assert "8 changes are lost" in line
    assert "--journal-accept-loss" in line


def test_the_files_of_two_journals_do_not_go_together(killed_early: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = filled(tmp_path / "other", count=9)
    for name in ("-wal", ".head", ""):
        mixed = tmp_path / f"mixed{name}" / killed_early.name
        shutil.copytree(killed_early.parent, mixed.parent)
        shutil.copy(f"{other}{name}", f"{mixed}{name}")
        assert outcome(mixed) == "refused", name


def test_an_older_copy_beside_a_newer_head_is_refused(path: Path) -> None:
    for mark in range(2):
        with TestClient(create_app(journal=path)) as client:
            register(client, batch_size=4)
            client.post("/scored_data", json=group(4, mark))
        if mark == 0:
            older = path.read_bytes()
    path.write_bytes(older)
    with pytest.raises(JournalDamaged, match=r"ends with change 4, .* names 8 as acknowledged: 4 changes"):
        create_app(journal=path)


@pytest.mark.parametrize("value", [None, 5, "text", 2.5])
@pytest.mark.parametrize(
    "column", ["changes.change", "changes.hash", "changes.crc", "changes.bodies", "bodies.body", "bodies.crc"]
)
def test_a_value_of_another_type_is_damage(path: Path, column: str, value: object) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        client.post("/scored_data", json=group(4, 1))
    table, name = column.split(".")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA writable_schema=ON")
        database.execute(
            f"UPDATE sqlite_master SET sql = replace(sql, '{name} BLOB NOT NULL', '{name}') WHERE name = '{table}'"
        )
        database.execute(
            f"UPDATE sqlite_master SET sql = replace(sql, '{name} INTEGER NOT NULL', '{name}') WHERE name = '{table}'"
        )
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE {table} SET {name} = ?", (value,))
    assert outcome(path) == "refused"


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        (["UPDATE bodies SET id = 3 - id + 10", "UPDATE bodies SET id = id - 10"], "the body of group"),
        (["DELETE FROM changes WHERE number = 2"], "change 3 does not follow the one before it"),
        (["DELETE FROM changes WHERE number = 4"], "change 5 does not follow the one before it"),
    ],
    ids=["groups change places", "2 is missing", "4 is missing"],
)
def test_a_change_that_breaks_the_chain_is_damage(path: Path, statements: list[str], says: str) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        for mark in (1, 2):
            client.post("/scored_data", json=group(4, mark))
        copy = path.with_name("killed.db")
        for name in ("", "-wal", ".head"):
            shutil.copy(f"{path}{name}", f"{copy}{name}")
    with closing(sqlite3.connect(copy)) as database, database:
        for statement in statements:
            database.execute(statement)
    with pytest.raises(JournalDamaged, match=says):
        create_app(journal=copy)


# --- what loses nothing
# ------------------------------------------------------------------------------------------------


def test_a_head_that_is_behind_its_journal_is_no_loss(path: Path) -> None:
    """The process dies after the change is on disk and before the head is: nobody was told of the change."""
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        head_before = Path(f"{path}.head").read_bytes()
        client.post("/scored_data", json=group(4, 1))
        copy = path.with_name("killed.db")
        for name in ("", "-wal"):
            shutil.copy(f"{path}{name}", f"{copy}{name}")
        Path(f"{copy}.head").write_bytes(head_before)
    assert outcome(copy) == "1 groups"
    assert outcome(copy) == "1 groups"


def test_a_head_whose_newest_record_was_cut_off_names_the_one_before(path: Path) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
    record = read_head(path)
    assert record is not None
    with closing(Head(path, 0)) as head:
        slot = head._slot
        head.write(type(record)(record.journal_id, chained(record.newest, record.newest.number + 1, b"x", b"")))
    with Path(f"{path}.head").open("r+b") as file:
        file.seek(slot * SLOT_BYTES + 20)
        file.write(b"\xff" * 50)
    assert read_head(path) == record
    assert outcome(path) == "0 groups"


@pytest.mark.parametrize("name", ["groups.db.new", "groups.db.head"])
def test_a_start_that_was_killed_while_it_made_the_journal_is_made_up_for(path: Path, name: str) -> None:
    path.with_name(name).write_bytes(b"" if name.endswith("head") else b"half a database")
    assert outcome(path) == "0 groups"


@pytest.mark.parametrize("name", [b"a?b%20c#d&mode=rwc.db", b"\xff\xfe.db", b"quo'te\".db"])
def test_a_journal_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    for found in ("0 groups", "0 groups"):
        assert outcome(path) == found
    assert sorted(map(os.fsencode, os.listdir(tmp_path))) == [name, name + b".head"]


def test_every_acknowledged_change_is_in_the_head(path: Path) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        for mark in range(5):
            client.post("/scored_data", json=group(4, mark))
            record = read_head(path)
            assert record is not None
            assert record.newest.number == 4 + mark


def test_a_head_that_cannot_be_written_refuses_everything_until_the_next_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(head: Head, record: object) -> None:
        raise OSError(28, "No space left on device")

    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        client.post("/scored_data", json=group(4, 1))
        with monkeypatch.context() as patch:
            patch.setattr(Head, "write", full)
            reply = client.post("/scored_data", json=group(4, 2), headers={"Idempotency-Key": "a"})
        assert reply.status_code == 507
        assert "start the API again" in reply.json()["detail"]
        # it would follow what nobody was told of
        assert client.post("/scored_data", json=group(4, 3)).status_code == 507
        assert client.get("/status").json()["queue_size"] == 1
        assert client.get("/ready").status_code == 503
    with TestClient(create_app(journal=path)) as client:
        assert client.post("/scored_data", json=group(4, 2), headers={"Idempotency-Key": "a"}).status_code == 200
        assert [marks(client), marks(client), marks(client)] == [[1], [2], None]


def test_a_journal_that_somebody_removes_acknowledges_nothing_that_would_be_gone(path: Path) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        assert client.post("/scored_data", json=group(4, 1)).status_code == 200
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
        reply = client.post("/scored_data", json=group(4, 2))
        assert reply.status_code == 507
        assert "removed" in reply.json()["detail"]
        assert client.get("/ready").status_code == 503


# --- a journal of the first format ----------------------------------------------------------------------------------


def of_the_first_format(path: Path) -> None:
    """Turn a closed journal into one as it was before changes were chained."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        changes = database.execute("SELECT number, change FROM changes").fetchall()
        for statement in (
            "DROP TABLE changes",
            "DROP TABLE dead_letters",
            "DROP TABLE identity",
            "CREATE TABLE changes (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, change BLOB NOT NULL)",
            "PRAGMA user_version=1",
        ):
            database.execute(statement)
        rows = [(number, zlib.crc32(change), change) for number, change in changes]
        database.executemany("INSERT INTO changes VALUES (?, ?, ?)", rows)
    Path(f"{path}.head").unlink()


def test_a_journal_of_the_first_format_is_taken_over_and_chained(path: Path) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        for mark in range(3):
            client.post("/scored_data", json=group(4, mark))
    of_the_first_format(path)
    assert outcome(path) == "3 groups"
    with closing(JournalReader(path)) as reader:
        reader.expect(read_head(path))
        assert len(list(reader.changes())) >= 1
    Path(f"{path}.head").unlink()
    assert outcome(path) == "refused"


def test_a_damaged_journal_of_the_first_format_is_left_as_it_is(path: Path) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        client.post("/scored_data", json=group(4, 1))
    of_the_first_format(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE changes SET crc = crc + 1")
    assert outcome(path) == "refused"


# --- accepting the loss ---------------------------------------------------------------------------------------------


def accepted(path: Path, caplog: pytest.LogCaptureFixture) -> tuple[list[list[int]], str]:
    """What a start finds that accepts the loss, and what it says was lost."""
    before = digests(path.parent)
    assert outcome(path) == "refused"
    with TestClient(create_app(journal=path, accept_loss=True)) as client:
        if client.get("/info").json()["batch_size"] == -1:
            register(client, batch_size=4)
        found = list(iter(lambda: marks(client), None))
        client.post("/scored_data", json=group(4, 99))
    (line,) = (record.getMessage() for record in caplog.records if "as they were found" in record.getMessage())
    copies = {name: digest for name, digest in digests(path.parent).items() if ".damaged-" in name}
    assert sorted(copies.values()) == sorted(
        digest for name, digest in before.items() if not name.endswith("-shm") and digest != NOTHING
    )
    assert outcome(path) == "1 groups"
    return found, line


def test_accepting_the_loss_keeps_what_was_whole_and_counts_the_changes(
    killed_early: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wal = Path(f"{killed_early}-wal")
    wal.write_bytes(wal.read_bytes()[:-30_000])
    found, line = accepted(killed_early, caplog)
    lost = 5 - len(found)
    assert lost > 0
    assert found == [[mark] for mark in range(len(found))]
    assert f"{lost} of 8 acknowledged changes are lost, {len(found)} groups are left" in line


@pytest.mark.parametrize(
    ("name", "said", "left"),
    [
        ("", "8 of 8 acknowledged changes are lost, nothing is left", 0),
        ("-wal", "8 of 8 acknowledged changes are lost, 0 groups are left", 0),
        (
            ".head",
            "without its head, the number of lost changes is unknown; it ends with change 8, 5 groups are left",
            5,
        ),
    ],
)
@pytest.mark.parametrize("damage", [remove, empty])
def test_accepting_the_loss_of_a_whole_file(
    killed_early: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    name: str,
    said: str,
    left: int,
) -> None:
    damage(Path(f"{killed_early}{name}"))
    found, line = accepted(killed_early, caplog)
    assert len(found) == left
    assert said in line


def test_accepting_the_loss_of_one_groups_bytes_keeps_the_others(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        env_id = register_env(client, group_size=4)
        for mark in range(3):  # four rollouts in five sequences
            client.post("/scored_data", json=group(5, mark, env_id=env_id, rollouts=[0, 0, 1, 2, 3]))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE bodies SET body = x'00' WHERE id = 2")
    found, line = accepted(path, caplog)
    assert found == [[0], [2]]
    assert "0 of 7 acknowledged changes are lost, 2 groups are left, 1 more had damaged bytes" in line


def test_a_whole_journal_is_not_touched_by_the_flag(path: Path) -> None:
    for _ in range(2):
        with TestClient(create_app(journal=path, accept_loss=True)) as client:
            register(client, batch_size=4)
    assert sorted(file.name for file in path.parent.iterdir()) == ["groups.db", "groups.db.head"]


def test_a_database_of_another_kind_is_not_taken_for_a_loss(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE mine (x)")
    before = digests(path.parent)
    with pytest.raises(JournalError, match="another kind"):
        create_app(journal=path, accept_loss=True)
    assert digests(path.parent) == before


# --- what is not a regular file
# ----------------------------------------------------------------------------------------


def a_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere.db"))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [a_link, a_pipe, a_socket, Path.mkdir])
@pytest.mark.parametrize("name", ["groups.db", "groups.db-wal", "groups.db.head"])
def test_only_regular_files_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], name: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    make(Path(name))
    with pytest.raises(JournalError, match=r"is a (link|pipe|socket|directory), not a regular file"):
        create_app(journal=Path("groups.db"))
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_device_is_left_alone() -> None:
    with pytest.raises(JournalError, match="/dev/null is a device, not a regular file"):
        create_app(journal=Path("/dev/null"))
    assert not list(Path("/dev").glob("null?*"))
    assert Path("/dev/null").is_char_device()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.api.journal.journal_file.LOCK_TIMEOUT_S", 0.1)
