"""The journal through the API: what survives a restart, and what a bad file or a full disk does."""

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from atroposlib.api import journalled_state
from atroposlib.api.journal.journal import Journal
from atroposlib.api.journal.journal_file import Body, JournalDamaged, JournalError
from atroposlib.api.journal.journal_head import Head, head_path, read_head
from atroposlib.api.server import create_app
from tests.unit.api.support import group, marks, register, register_env, registration
from tests.unit.common.disk import broken_disk, watch_disk


def api(path: Path, first_lease: int = 1) -> TestClient:
    app = create_app(journal=path)
    app.state.service.new_lease = count(first_lease).__next__
    return TestClient(app)


def lease(client: TestClient, trainer: int, *holding: int) -> tuple[int | None, list[int] | None]:
    reply = client.post("/batch/lease", json={"trainer": trainer, "holding": list(holding)}).json()
    return reply["lease"], None if reply["batch"] is None else [item["tokens"][0][0] for item in reply["batch"]]


def crashed(path: Path) -> Path:
    """The files as a process that is killed leaves them, under another name."""
    copy = path.with_name("crashed.db")
    for suffix in ("", "-wal", ".head"):
        if (source := Path(f"{path}{suffix}")).exists():
            Path(f"{copy}{suffix}").write_bytes(source.read_bytes())
    return copy


@pytest.mark.parametrize("end", [crashed, lambda path: path], ids=["killed", "ended"])
def test_everything_is_as_it_was_after_a_restart(path: Path, end: Callable[[Path], Path]) -> None:
    with api(path) as client:
        register(client, batch_size=8, starting_step=3)
        env_id = register_env(client, group_size=4, min_batch_allocation=0.25)
        uuid = client.post("/register", json=registration(8, starting_step=4)).json()["uuid"]
        client.get("/batch")
        client.post("/scored_data_list", json=[group(4, mark, policy_versions=[[mark, mark]] * 4) for mark in range(9)])
        client.post("/scored_data", json=group(3, 9, env_id=env_id))
        assert marks(client) is None  # the environment has a minimum and nothing queued
        client.post("/disconnect-env", json={"env_id": env_id})
        assert marks(client) == [0, 1]
        assert [lease(client, uuid), lease(client, uuid, 1)] == [(1, [2, 3]), (2, [4, 5])]
        client.post("/batch/ack", json={"trainer": uuid, "leases": [1]})
        client.post("/trainer-step", json={"step": 5, "policy_version": 6})
        client.post("/evaluation", json={"env_id": env_id, "policy_version": 5, "accuracy": 0.5})
        paths = ["/status", "/info", "/wandb_info", f"/status-env?env_id={env_id}", "/evaluations?policy_version=5"]
        before = {path: client.get(path).json() for path in paths}
        path = end(path) if end is crashed else path
    with api(path, first_lease=3) as client:
        assert {path: client.get(path).json() for path in before} == before
        assert lease(client, uuid, 2) == (3, [6, 7])
        assert client.post("/scored_data", json=group(1, 10, env_id=env_id)).json() == {
            "status": "buffered",
            "buffer_size": 0,
        }
        assert client.post("/batch/ack", json={"trainer": uuid, "leases": [2, 3]}).json()["acknowledged"] == 2
        assert [lease(client, uuid), lease(client, uuid, 4)] == [(4, [8, 9, 10]), (None, None)]


@pytest.mark.parametrize("sign", ["heartbeat", "poll", "resumed"])
def test_environments_join_after_a_restart_once_the_trainer_is_heard_of(path: Path, sign: str) -> None:
    """A whole run may have started again, whose trainer resumes at an earlier step than the journal's last."""
    asked = {"desired_name": "gsm8k", "group_size": 4, "max_token_length": 128, "weight": 1.0}
    with api(path) as client:
        trainer = client.post("/register", json=registration(8, starting_step=3)).json()["uuid"]
        client.get("/batch")
    with api(path) as client:
        assert client.post("/register-env", json=asked).json() == {"status": "wait for trainer to start"}
        if sign == "heartbeat":
            client.post("/heartbeat", json={"trainer": trainer})
        elif sign == "resumed":
            client.post("/register", json=registration(8, starting_step=2))
        if sign != "heartbeat":
            client.get("/batch")
        joined = client.post("/register-env", json=asked).json()
        assert (joined["status"], joined["starting_step"]) == ("success", 2 if sign == "resumed" else 3)


def test_a_post_repeated_after_a_restart_is_stored_once(path: Path) -> None:
    key = {"Idempotency-Key": "a"}
    with api(path) as client:
        register(client, batch_size=4)
        env_id = register_env(client, group_size=8)
        first = client.post("/scored_data", json=group(3, env_id=env_id), headers=key).json()
    with api(path) as client:
        assert client.post("/scored_data", json=group(3, env_id=env_id), headers=key).json() == first
        assert client.post("/scored_data", json=group(3, env_id=env_id)).json()["buffer_size"] == 6


def test_a_key_used_for_other_groups_is_refused_after_a_restart_too(path: Path) -> None:
    key = {"Idempotency-Key": "a"}
    for compact in (False, True):
        with api(path) as client:
            register(client, batch_size=4)
            if not compact:
                assert client.post("/scored_data", json=group(4, 1), headers=key).status_code == 200
            assert client.post("/scored_data", json=group(4, 2), headers=key).status_code == 422
            assert client.post("/scored_data", json=group(4, 1), headers=key).status_code == 200


@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_nobody_else_reads_a_journal_whatever_the_umask_and_its_former_mode(path: Path, before: int | None) -> None:
    mask = os.umask(0)
    try:
        for _ in range(2):
            with api(path) as client:
                register(client, batch_size=4)
                client.post("/scored_data", json=group(4, 1))
                found = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
                assert {*found.values()} == {0o600}, found
                assert len(found) == 4
            if before is not None:
                for file in path.parent.iterdir():
                    file.chmod(before)
    finally:
        os.umask(mask)


def test_rollouts_of_several_sequences_wait_in_the_journal_as_they_were(path: Path) -> None:
    posted = [group(4, mark, rollouts=[0, 0, 1, 1]) for mark in range(3)]
    with api(path) as client:
        register(client, batch_size=4)
        client.post("/scored_data_list", json=posted)
    with api(path) as client:
        batch = client.get("/batch").json()["batch"]
        assert [(item["tokens"], item["rollouts"]) for item in batch] == [
            (each["tokens"], [0, 0, 1, 1]) for each in posted[:2]
        ]
        assert client.get("/status").json()["queue_size"] == 1


def test_packed_and_plain_groups_come_back_as_they_were(path: Path) -> None:
    import msgspec

    full = group(4, 7, scores=[0.1, -1e300, 2.5e-8, 0.0], messages=[[{"role": "user", "content": "ü"}]] * 4)
    with api(path) as client:
        register(client, batch_size=8)
        client.post(
            "/scored_data", content=msgspec.msgpack.encode(full), headers={"Content-Type": "application/msgpack"}
        )
        client.post("/scored_data", json=full)
    with api(path) as client:
        batch = client.get("/batch").json()["batch"]
    assert [{name: item[name] for name in full} for item in batch] == [full, full]


def test_what_left_is_removed_and_the_journal_is_compacted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journalled_state, "COMPACT_FROM", 10)
    with api(path) as client:
        register(client, batch_size=4)
        for mark in range(40):
            client.post("/scored_data", json=group(4, mark))
            assert marks(client) == [mark]
        client.post("/scored_data", json=group(4, 40))
    journal = Journal(path)
    assert [body.id for body in journal.reader.bodies()] == [41]
    assert len(list(journal.reader.changes())) == 1
    journal.close()


def test_a_reset_is_kept_too(path: Path) -> None:
    with api(path) as client:
        register(client)
        client.post("/scored_data", json=group(8))
        client.post("/reset_data")
    with api(path) as client:
        assert client.get("/info").json()["batch_size"] == -1
        assert client.get("/status").json()["queue_size"] == 0


# --- the disk -------------------------------------------------------------------------------------------------------


def opened(path: Path) -> Journal:
    """A journal that is ready to be written."""
    journal = Journal(path)
    assert list(journal.reader.changes()) == []
    journal.keep_only(set())
    return journal


@pytest.mark.parametrize("start", ["first", "second"])
def test_every_commit_waits_for_the_disk(path: Path, start: str) -> None:
    """No kill shows it, as the page cache outlives a process: SQLite flushes its log at each commit if it is told FULL,
    and leaves that to the next checkpoint if it is told NORMAL.
    """
    if start == "second":
        opened(path).close()
    with api(path) as client:
        register(client)
        database = client.app.state.service.journal._db  # type: ignore[attr-defined]
        settings = {name: database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")}
    assert settings == {"synchronous": 2, "journal_mode": "wal"}


def test_a_change_is_in_the_file_and_named_by_the_head_before_anybody_is_told(path: Path) -> None:
    journal, told = opened(path), []

    def done(error: JournalError | None) -> None:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
            (newest,) = reader.execute("SELECT max(number) FROM changes").fetchone()
        head = read_head(path)
        told.append((error, newest, head and head.newest.number))

    for number in (1, 2, 3):
        journal.write(number, b"change", (), done)
        journal._writes.put(None)  # one transaction each: the thread ends, and starts again with the next
        assert journal._thread is not None
        journal._thread.join()
        journal._thread = None
    journal.close()
    assert told == [(None, 1, 1), (None, 2, 2), (None, 3, 3)]


def test_a_write_to_a_closed_journal_fails_and_does_not_wait(path: Path) -> None:
    journal = opened(path)
    told: list[JournalError | None] = []
    journal.write(1, b"change", (), told.append)
    journal.close()
    journal.write(2, b"change", (), told.append)
    assert told[0] is None
    assert isinstance(told[1], JournalError)
    assert "is closed" in str(told[1])
    with closing(Journal(path)) as again:
        assert list(again.reader.changes()) == [(1, b"change")]


def test_a_new_journal_is_named_by_its_head_on_the_disk_before_it_has_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head without a journal is a start that was cut off; a journal without a head is damage."""
    with monkeypatch.context() as patch:
        acts = watch_disk(patch)
        Journal(path).close()
    (made,) = (at for at, act in enumerate(acts) if act.kind == "rename" and act.path == path)
    before = [act for act in acts[:made] if act.kind == "flush"]
    head = next(at for at, act in enumerate(before) if act.path == head_path(path) and act.content)
    assert any(act.path == path.parent and b"groups.db.head" in act.content for act in before[head:])
    assert any(act.path == path.parent and b"groups.db\0" in act.content for act in acts[made + 1 :])


def test_a_snapshot_that_is_older_than_the_newest_change_leaves_what_came_after_it(path: Path) -> None:
    journal = opened(path)
    for number in (1, 2, 3):
        journal.write(number, b"change", (), lambda error: None)
    journal.write(2, b"snapshot", (), lambda error: None, replaces=True)
    journal.write(4, b"change", (), lambda error: None)
    journal.close()
    head = read_head(path)
    assert head is not None
    assert head.newest.number == 4
    again = Journal(path)
    assert list(again.reader.changes()) == [(2, b"snapshot"), (3, b"change"), (4, b"change")]
    again.close()


def test_what_may_go_goes_with_the_first_write_that_the_disk_takes(path: Path) -> None:
    journal, outcomes = opened(path), list[JournalError | None]()

    def write(number: int, change: bytes, bodies: tuple[Body, ...] = ()) -> None:
        journal.write(number, change, bodies, outcomes.append)
        while len(outcomes) < number:
            time.sleep(0.001)

    write(1, b"change", (Body(7, b"body", packed=False), Body(8, b"body", packed=False)))
    assert journal._db is not None
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages}")
    journal.forget([7])
    write(2, b"x" * 1_000_000)
    journal._db.execute("PRAGMA max_page_count=1000000")
    write(3, b"change")
    assert journal._db.execute("SELECT id FROM bodies").fetchall() == [(8,)]
    journal.close()
    assert [error is None for error in outcomes] == [True, False, True]


def test_a_head_that_cannot_be_written_refuses_what_was_written_and_all_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(path)
    outcomes: list[JournalError | None] = []

    def broken(head: Head, record: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Head, "write", broken)
        journal.write(1, b"change", (), outcomes.append)
        while not outcomes:
            time.sleep(0.001)
    journal.write(2, b"change", (), outcomes.append)
    journal.close()
    assert [str(error).partition(" cannot be written ")[2] for error in outcomes] == [
        "(Input/output error); repair its disk, then start the API again"
    ] * 2
    again = Journal(path)
    assert [number for number, _ in again.reader.changes()] == [1]  # nobody was told of it, nor of what came after
    again.close()


def test_a_disk_that_fails_at_the_end_keeps_no_lock(path: Path) -> None:
    journal = opened(path)
    with broken_disk():
        journal.close()
    Journal(path).close()


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_with_507_changes_nothing_and_goes_on_when_there_is_room(path: Path) -> None:
    with api(path) as client:
        register(client, batch_size=4)
        assert client.post("/scored_data", json=group(4, 1)).status_code == 200
        database = client.app.state.service.journal._db  # type: ignore[attr-defined]
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count={pages + 1}")
        large = group(4, 2, messages=[[{"role": "user", "content": "x" * 200_000}]] * 4)
        reply = client.post("/scored_data", json=large, headers={"Idempotency-Key": "a"})
        assert reply.status_code == 507
        assert "free space" in reply.json()["detail"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        assert client.get("/status").json()["queue_size"] == 1
        database.execute("PRAGMA max_page_count=1000000")
        assert client.post("/scored_data", json=large, headers={"Idempotency-Key": "a"}).status_code == 200
        assert client.get("/ready").status_code == 200
    with api(path) as client:
        assert [marks(client), marks(client), marks(client)] == [[1], [2], None]


def test_a_small_post_beside_one_that_does_not_fit_is_taken(path: Path) -> None:
    journal = Journal(path)
    assert list(journal.reader.changes()) == []
    journal.keep_only(set())
    assert journal._db is not None
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages + 2}")
    outcomes: dict[int, JournalError | None] = {}
    for number, size in ((1, 100), (2, 1_000_000), (3, 100)):
        journal.write(number, b"x" * size, (), partial(outcomes.__setitem__, number))
    journal.close()
    assert {number: error is None for number, error in outcomes.items()} == {1: True, 2: False, 3: True}
    again = Journal(path)
    assert [number for number, _ in again.reader.changes()] == [1, 3]
    again.close()


def test_two_apis_cannot_share_a_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.api.journal.journal_file.LOCK_TIMEOUT_S", 0.1)
    with (
        api(path),
        pytest.raises(JournalError, match="in use by another process; end it, or give this one a path of its own"),
    ):
        create_app(journal=path)


def damage_header(path: Path) -> None:
    path.write_bytes(b"\0" * 200 + path.read_bytes()[200:])


def damage_group(path: Path) -> None:
    content = path.read_bytes()
    at = content.index(b"[[77,")
    path.write_bytes(content[:at] + b"[[78," + content[at + 5 :])


def damage_structure(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for page in range(16_384, len(content), 16_384):
        content[page : page + 64] = b"\xee" * 64
    path.write_bytes(content)


def lose_a_group(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM bodies")
    database.close()


@pytest.mark.parametrize("damage", [damage_header, damage_group, damage_structure, lose_a_group])
def test_a_damaged_journal_is_named_with_the_remedy_and_left_alone(path: Path, damage: Callable[[Path], None]) -> None:
    with api(path) as client:
        register(client)
        client.post("/scored_data", content=b'{"tokens":[[77,1]],"masks":[[77,1]],"scores":[1]}')
    damage(path)
    before = path.read_bytes()
    with pytest.raises(JournalError) as error:
        create_app(journal=path)
    assert "is damaged" in str(error.value)
    assert "--journal-accept-loss" in str(error.value)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before


def test_a_journal_where_none_can_be_says_what_to_do(path: Path, tmp_path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE mine (x)")
    database.close()
    for place, says in (
        (path, "another kind"),
        (tmp_path / "no" / "groups.db", "does not exist; create it"),
        (tmp_path, r"cannot be used|cannot be opened"),
    ):
        with pytest.raises(JournalError, match=says):
            create_app(journal=place)


def test_a_write_that_was_cut_off_before_its_reply_is_as_if_it_had_not_been(path: Path) -> None:
    with api(path) as client:
        register(client, batch_size=4)
        client.post("/scored_data", json=group(4, 1))
        head_before = Path(f"{path}.head").read_bytes()
        client.post("/scored_data", json=group(4, 2))
        torn = crashed(path)
    wal = Path(f"{torn}-wal")
    wal.write_bytes(wal.read_bytes()[:-5000])
    with pytest.raises(JournalDamaged, match=r"it ends with change 4, .* names 5 as acknowledged: 1 change is lost"):
        create_app(journal=torn)
    # as when the process dies between the log and the head: nobody was told
    Path(f"{torn}.head").write_bytes(head_before)
    with api(torn) as client:
        assert [marks(client), marks(client)] == [[1], None]


def test_posts_that_wait_together_share_a_transaction(path: Path) -> None:
    app = create_app(journal=path)
    running = app.state.service
    commits: list[int] = []
    commit = running.journal._commit

    def counting(together: list[Any]) -> None:
        commits.append(len(together))
        commit(together)

    running.journal._commit = counting

    async def post_many() -> None:
        from atroposlib.api.state.changes import PostedGroup

        await asyncio.gather(*(running.post([PostedGroup(4, None, None)], [(b"{}", False)], None) for _ in range(100)))
        await running.close()

    asyncio.run(post_many())
    assert sum(commits) >= 100
    assert len(commits) <= 20


def test_a_new_journal_is_written_only_after_it_was_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers, keep_only = [], Journal.keep_only

    def noted(journal: Journal, ids: set[int]) -> None:
        writers.append(journal._thread)
        keep_only(journal, ids)

    monkeypatch.setattr(Journal, "keep_only", noted)
    with api(path) as client:
        register(client, batch_size=8)
    assert writers == [None]  # one connection: a writer beside it meets "a transaction within a transaction"
