"""`run-api journal`: the commands beside a running API, and on the files of one that has ended."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from fastapi.testclient import TestClient

from atroposlib.agents.turn_journal import SessionRecord, TurnJournal
from atroposlib.api.server import create_app
from atroposlib.cli.run_api import main
from tests.unit.api.journal.test_journal_damage import digests
from tests.unit.api.support import DEADLINE_S, command, group, marks, register, register_env, registration


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path / "live" / "groups.db"


@pytest.fixture
def client(path: Path) -> Iterator[TestClient]:
    """A running API with a batch on a lease, a group that waits, one in MessagePack, one that is buffered and a dead
    letter.
    """
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)
        env_id = register_env(client, group_size=4)
        trainer = client.post("/register", json=registration(4)).json()["uuid"]
        for mark in (1, 2):
            client.post("/scored_data", content=json.dumps(group(4, mark, env_id=env_id), indent=2))
        lease = client.post("/batch/lease", json={"trainer": trainer, "holding": []}).json()["lease"]
        rejection = {"trainer": trainer, "lease": lease, "groups": [{"id": 1, "reason": "its scores are odd"}]}
        assert client.post("/batch/reject", json=rejection).json()["rejected"]
        client.post("/batch/lease", json={"trainer": trainer, "holding": []})
        packed = msgspec.msgpack.encode(group(4, 3))
        client.post("/scored_data", content=packed, headers={"Content-Type": "application/msgpack"})
        client.post("/scored_data", json=group(3, 4, env_id=env_id))
        yield client


def run(*arguments: object) -> None:
    main(["journal", *map(str, arguments)])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1) -> str:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == code
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    return line


def test_verify_reads_a_running_apis_journal(
    client: TestClient, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("verify", path)
    (line,) = capsys.readouterr().out.splitlines()
    assert "is intact" in line
    assert "groups: 3" in line
    assert "dead letters: 1" in line
    client.post("/scored_data", json=group(4, 5))
    run("verify", path)
    assert "groups: 4" in capsys.readouterr().out


def test_the_commands_leave_no_trace_on_files_that_nobody_has_open(
    client: TestClient, path: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("", "-wal", ".head"):
        (killed / f"groups.db{name}").write_bytes(Path(f"{path}{name}").read_bytes())
    before = digests(killed)
    run("verify", killed / "groups.db")
    run("export", killed / "groups.db")
    run("dead-letters", killed / "groups.db")
    run("backup", killed / "groups.db", tmp_path / "copy.db")
    assert digests(killed) == before


def test_the_journal_of_another_program_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "turns.journal"
    with closing(TurnJournal(path)) as journal:
        asyncio.run(journal.write_session(SessionRecord("a", "key", {}, 0.0)))
    assert "another program wrote it, such as `atropos agent-endpoint`" in refusal(capsys, "verify", path)


@pytest.mark.parametrize("damage", ["-wal", ".head", ""])
def test_every_command_refuses_a_damaged_journal_in_one_line(
    client: TestClient, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    damaged = tmp_path / "groups.db"
    for name in {"", "-wal", ".head"} - {damage}:
        Path(f"{damaged}{name}").write_bytes(Path(f"{path}{name}").read_bytes())
    if not damage:
        damaged.touch()
    before = digests_of_files(tmp_path)
    for arguments in (["verify"], ["export"], ["dead-letters"], ["backup"]):
        more = [tmp_path / "copy.db"] if arguments == ["backup"] else []
        assert "is damaged" in refusal(capsys, *arguments, damaged, *more)
    assert digests_of_files(tmp_path) == before


def digests_of_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_a_backup_of_a_running_apis_journal_is_a_journal_by_itself(
    client: TestClient, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.db"
    run("backup", path, copy)
    client.post("/scored_data", json=group(4, 9))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy.db", "copy.db.head", "live"]
    assert "exists; name another destination" in refusal(capsys, "backup", path, copy)
    with TestClient(create_app(journal=copy)) as restored:
        uuid = restored.post("/register", json=registration(4)).json()["uuid"]
        found: list[int] = []
        while (reply := restored.post("/batch/lease", json={"trainer": uuid, "holding": found}).json())[
            "batch"
        ] is not None:
            found.append(reply["lease"])
        assert len(found) == 2
    run("verify", copy)


@pytest.mark.parametrize("suffix", ["", "-wal", ".head", ".new"])
def test_a_backup_follows_no_link(
    path: Path, tmp_path: Path, client: TestClient, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    (tmp_path / f"copy.db{suffix}").symlink_to(tmp_path / "elsewhere")
    refusal(capsys, "backup", path, tmp_path / "copy.db")
    assert not (tmp_path / "elsewhere").exists()


def test_backups_taken_while_groups_come_in_are_whole(path: Path, tmp_path: Path) -> None:
    posting = threading.Event()
    posting.set()
    with TestClient(create_app(journal=path)) as client:
        register(client, batch_size=4)

        def post() -> None:
            mark = 0
            while posting.is_set():
                client.post(
                    "/scored_data", json=group(4, mark, messages=[[{"role": "user", "content": "x" * 9000}]] * 4)
                )
                mark += 1

        poster = threading.Thread(target=post)
        poster.start()
        for number in range(5):
            run("backup", path, tmp_path / f"{number}.db")
        posting.clear()
        poster.join()
    for number in range(5):
        with TestClient(create_app(journal=tmp_path / f"{number}.db")) as restored:
            waiting = restored.get("/status").json()["queue_size"]
            assert [marks(restored) for _ in range(waiting)] == [[mark] for mark in range(waiting)]


def test_export_writes_each_group_with_where_it_is(client: TestClient, path: Path, tmp_path: Path) -> None:
    run("export", path, "--output", tmp_path / "groups.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    found = [(line["status"], line["environment"], line["rollouts"], line["group"]["tokens"][0][0]) for line in lines]
    assert found == [("leased", "math_0", 4, 2), ("waiting", None, 4, 3), ("buffered", "math_0", 3, 4)]
    assert {**lines[1]["group"], **group(4, 3)} == lines[1]["group"]
    assert lines[0]["id"] == 2


@pytest.mark.services
def test_groups_are_exported_to_a_terminal_that_cannot_show_them(client: TestClient, path: Path) -> None:
    client.post("/scored_data", json=group(4, 5) | {"messages": [[{"role": "user", "content": "é\u2028"}]] * 4})
    exported = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.run_api", "journal", "export", path],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert any(
        "é" in json.dumps(json.loads(line), ensure_ascii=False) for line in exported.stdout.decode().split("\n") if line
    )


def test_a_file_that_exists_is_not_written_over(
    client: TestClient, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    for arguments in (["export", path, "--output"], ["dead-letters", path, "--export"], ["backup", path]):
        assert "exists" in refusal(capsys, *arguments, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"


def test_dead_letters_are_listed_and_exported(
    client: TestClient, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("dead-letters", path, "--export", tmp_path / "letters.jsonl")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split("\t")[2:] == ["math_0", "its scores are odd"]
    assert line.split("\t")[1].endswith("Z")
    (letter,) = map(json.loads, (tmp_path / "letters.jsonl").read_text().splitlines())
    assert letter["reason"] == "its scores are odd"
    assert letter["group"]["tokens"][0][0] == 1


def test_a_damaged_dead_letter_is_noticed(
    path: Path, client: TestClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("backup", path, tmp_path / "copy.db")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as database, database:
        database.execute("UPDATE dead_letters SET body = x'00'")
    capsys.readouterr()
    assert "dead letter 1 has other bytes" in refusal(capsys, "verify", tmp_path / "copy.db")


def test_wrong_words_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in ([], ["frobnicate", "x"], ["verify"], ["verify", "x", "--output", "y"]):
        assert "run-api journal" in refusal(capsys, *arguments, code=2)
    assert "nowhere.db" in refusal(capsys, "verify", tmp_path / "nowhere.db")
    assert list(tmp_path.iterdir()) == []


def operators_commands() -> list[str]:
    """The blocks of commands on the page for operators."""
    page = (Path(__file__).parents[4] / "docs" / "operate.md").read_text()
    return [part.split("```")[0] for part in page.split("```sh\n")[1:]]


@pytest.mark.services
def test_a_journal_is_restored_from_its_backup_as_documented(path: Path) -> None:
    """Groups posted later are gone, and a batch acknowledged later waits again."""
    with TestClient(create_app(journal=path)) as client:
        trainer = client.post("/register", json=registration(4)).json()["uuid"]
        client.post("/scored_data", json=group(4, 1))
        run("backup", path, path.parent / "monday.db")
        lease = client.post("/batch/lease", json={"trainer": trainer, "holding": []}).json()["lease"]
        client.post("/batch/ack", json={"trainer": trainer, "leases": [lease]})
        client.post("/scored_data", json=group(4, 2))
    path.write_bytes(b"damaged")
    restore = next(text for text in operators_commands() if "cp monday.db" in text)
    root = Path(__file__).parents[4]
    found = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    commands = restore.replace("atropos-api-8000.db", path.name)
    subprocess.run(["sh", "-ec", commands], cwd=path.parent, env=found, timeout=4 * DEADLINE_S, check=True)
    with TestClient(create_app(journal=path)) as client:
        again = client.post("/batch/lease", json={"trainer": trainer, "holding": []}).json()
        assert [item["tokens"][0][0] for item in again["batch"]] == [1]
        client.post("/batch/ack", json={"trainer": trainer, "leases": [again["lease"]]})
        assert client.post("/batch/lease", json={"trainer": trainer, "holding": []}).json()["batch"] is None


@pytest.mark.services
def test_the_commands_of_the_documentation_work_beside_a_running_api(path: Path, client: TestClient) -> None:
    root = Path(__file__).parents[4]
    block = next(text for text in operators_commands() if "backup" in text)
    found = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    commands = block.replace("atropos-api-8000.db", path.name)
    ended = subprocess.run(["sh", "-ec", commands], cwd=path.parent, env=found, timeout=4 * DEADLINE_S)
    assert ended.returncode == 0
    written = {"groups.jsonl", "letters.jsonl", "monday.db", "monday.db.head"}
    assert written <= {file.name for file in path.parent.iterdir()}


@pytest.mark.services
def test_a_pipe_that_closes_early_is_no_failure(path: Path, client: TestClient) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    exported = subprocess.run(
        [*command(), "journal", "export", str(path)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    os.close(writer)
    assert (exported.returncode, exported.stderr) == (0, "")


def test_a_reason_cannot_forge_the_lines_of_the_list(
    client: TestClient, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.post("/scored_data", json=group(4, 7))
    trainer = client.post("/register", json=registration(4)).json()["uuid"]
    leased = client.post("/batch/lease", json={"trainer": trainer, "holding": [], "ids": True}).json()
    letter = {"id": leased["ids"][0], "reason": "odd\n99\t2026-01-01T00:00:00Z\tmath\tforged\x1b[2J"}
    rejection = {"trainer": trainer, "lease": leased["lease"], "groups": [letter]}
    assert client.post("/batch/reject", json=rejection).is_success
    run("dead-letters", path)
    shown = capsys.readouterr().out
    assert r"odd\n99\t2026" in shown
    assert r"\x1b[2J" in shown
    assert len(shown.splitlines()) == 2
