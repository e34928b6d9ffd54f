"""Every other route, hostile requests, and what a browser may do."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.run_record import add_outcome
from atroposlib.api.journal.journal_file import create
from atroposlib.view import replies, server
from atroposlib.view.run_data import metric_rows
from tests.unit.view.support import START, STEP_S, client, get, make_run, metrics_row, sample, tokens_of, write_rows

ROUTES = [
    "",
    "/metrics",
    "/evaluations",
    "/timeline",
    "/settings",
    "/environments",
    "/logs",
    "/held_out",
    "/groups",
    "/groups/samples.0",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "r")


def test_runs_are_listed_with_how_far_they_have_come(run: Path) -> None:
    (found,) = get(client(run), "/api/runs")["runs"]
    assert (found["run"], found["path"], found["state"]) == ("r", str(run), "finished")
    assert (found["steps_done"], found["planned_steps"], found["seed"], found["commit"]) == (3, 3, 7, "abc")
    assert found["latest"] == {"reward_mean": 0.3, "accuracy": 0.5}
    assert (found["environments"], found["problems"]) == (["gsm8k"], [])
    assert found["started"] == 1_800_000_000


def test_a_run_that_was_copied_ended_when_its_launcher_says(run: Path) -> None:
    def ended() -> float:
        return float(get(client(run), "/api/runs")["runs"][0]["ended"])

    os.utime(run / "metrics.jsonl", (START + 5000, START + 5000))
    assert ended() == json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    (run / "run.json").write_text(json.dumps({"starts": [{"time": "2027-01-15T10:00:00+0200"}]}))
    (run / "launcher.log").write_text("2027-01-15 10:05:00 INFO    [launcher] trainer has ended\n")
    assert ended() == START + 300
    (run / "metrics.jsonl").unlink()
    (run / "launcher.log").write_text("nothing that is a time\n")
    os.utime(run / "launcher.log", (START + 9, START + 9))
    os.utime(run / "run.json", (START + 7, START + 7))
    assert ended() == START + 9


def test_a_run_that_ended_early_of_its_own_is_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=2)
    assert get(client(run), "/api/runs")["runs"][0]["state"] == "ended"
    add_outcome(run / "run.json", {"last": {"accuracy": 0.5}})
    assert get(client(run), "/api/runs")["runs"][0]["state"] == "finished"


def test_a_run_whose_launcher_lives_is_running(run: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    (run / "pids").mkdir()
    record = {"name": "launcher", "pid": os.getpid(), "start": ticks, "boot": boot, "url": ""}
    (run / "pids" / "launcher").write_text(json.dumps(record))
    assert get(client(run), "/api/runs")["runs"][0]["state"] == "running"
    (run / "pids" / "launcher").write_text(json.dumps(record | {"start": ticks + 1}))  # another process of that number
    assert get(client(run), "/api/runs")["runs"][0]["state"] == "killed"


def test_runs_of_one_name_have_labels_of_their_own(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / place / "r") for place in ("a", "b", "c/a")]
    window = client(*runs)
    labels = [found["run"] for found in get(window, "/api/runs")["runs"]]
    assert labels == ["r (a)", "r (b)", "r (a 2)"]
    for label in labels:
        assert get(window, f"/api/runs/{label}/groups")["total"] == 6


def test_every_run_of_a_directory_is_shown_and_new_ones_appear(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    (tmp_path / "secret").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "file").write_text("")
    (tmp_path / "bad\nname").mkdir()
    window = client(parent=tmp_path)
    assert {found["run"] for found in get(window, "/api/runs")["runs"]} == {"one", "secret"}
    make_run(tmp_path / "two")
    assert {found["run"] for found in get(window, "/api/runs")["runs"]} == {"one", "secret", "two"}


def test_metrics_come_from_where_the_last_request_ended(run: Path) -> None:
    window, path = client(run), "/api/runs/r/metrics"
    first = get(window, path)
    assert first["columns"][:3] == ["step", "reward_mean", "loss"]
    assert [row[:3] for row in first["rows"]] == [[1, 0.1, None], [2, 0.2, None], [3, 0.3, None]]
    assert (first["next"], first["reset"], first["more"]) == (3, False, False)

    def following() -> Any:
        return get(window, path, after=first["next"], generation=first["generation"])

    assert following()["rows"] == []
    write_rows(run / "metrics.jsonl", [metrics_row(4) | {"new": 1}], "a")
    second = following()
    assert [row[0] for row in second["rows"]] == [4]
    assert second["columns"][-1] == "new"
    assert (second["next"], second["reset"]) == (4, False)
    write_rows(run / "metrics.jsonl", [metrics_row(1)])  # a resumed run has dropped the others
    third = following()
    assert ([row[0] for row in third["rows"]], third["next"], third["reset"]) == ([1], 1, True)
    (run / "metrics.jsonl").unlink()
    assert following()["rows"] == []


def test_a_row_that_is_too_long_for_a_reply_hides_no_later_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_rows, "REPLY_BYTES", 1000)
    window, rows = client(run), []
    write_rows(run / "metrics.jsonl", [{"step": 1}, {"step": 2, "text": "x" * 3000}, {"step": 3}])
    found = get(window, "/api/runs/r/metrics")
    while True:
        rows += found["rows"]
        if not found["more"]:
            break
        found = get(window, "/api/runs/r/metrics", after=found["next"], generation=found["generation"])
    assert (rows, found["next"]) == ([[1], [3]], 3)


def test_a_table_of_rows_that_share_no_column_is_bounded(run: Path) -> None:
    (run / "metrics.jsonl").write_text("".join(f'{{"c{number}": 1}}\n' for number in range(3000)))
    found = get(client(run), "/api/runs/r/metrics")
    assert (len(found["rows"]), found["next"]) == (3000, 3000)
    assert len(found["columns"]) * len(found["rows"]) <= 1_000_000


@pytest.mark.parametrize("time", ["1e300", "1e18", "1e12", "-1e18"])
def test_a_run_that_ended_in_no_year_has_a_page(run: Path, time: str) -> None:
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "time": {time}}}\n')
    details = get(client(run), "/api/runs/r/settings")["details"]
    assert "Ended" not in dict(details) or dict(details)["Ended"].endswith(" UTC")


def test_values_that_are_no_numbers_are_null_and_damaged_rows_left_out(run: Path) -> None:
    rows = ['{"step": 1, "a": true, "b": "x", "d": [1]}', "{", "[]", '{"step": 2, "a": NaN}', '{"step":3}']
    (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step"')
    found = get(client(run), "/api/runs/r/metrics")
    assert [row[0] for row in found["rows"]] == [1, 3]
    assert found["rows"][0][1:] == [None] * 3
    assert found["next"] == 5


def test_the_timeline_shows_trainer_and_sampler(run: Path) -> None:
    steps = get(client(run), "/api/runs/r/timeline")["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    end = START + STEP_S
    assert [(part["what"], part["end"] - part["start"]) for part in steps[0]["trainer"]] == [
        ("waiting", 4.0),
        ("training", 3.0),
        ("syncing", 2.0),
        ("evaluating", 1.0),
    ]
    assert steps[0]["trainer"][-1]["end"] == end
    assert steps[0]["sampler"] == [[end - STEP_S + 1, end - STEP_S + 4]]
    assert len(get(client(run), "/api/runs/r/timeline", **{"from": 2, "to": 2})["steps"]) == 1


def test_steps_that_last_for_ever_do_not_fill_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MAX_PIECES", 100)
    write_rows(run / "metrics.jsonl", [{"step": 1, "time": START, "train_s": 1e6}] * 50)
    write_rows(
        run / "samples.jsonl", [{"started": START - 100 * at, "time": START - 100 * at + 1} for at in range(1, 41)]
    )
    steps = get(client(run), "/api/runs/r/timeline")["steps"]
    assert [len(step["sampler"]) for step in steps] == [40, 40, 20] + [0] * 47


def test_settings_are_flat(run: Path) -> None:
    found = get(client(run), "/api/runs/r/settings")["settings"]
    assert found["environments.gsm8k.group_size"] == 2
    assert (found["trainer.lr"], found["seed"], found["commit"]) == (0.1, 7, "abc")


def test_defaults_are_those_that_the_services_resolved(run: Path) -> None:
    (run / "trainer.yaml").write_text("lr: 0.1\nalgorithm: grpo\nresume: null\nbridge: {kind: broadcast}\n")
    (run / "env.yaml").write_text("env: {group_size: 2, max_new_tokens: 400}\nopenai: []\n")
    reply = get(client(run), "/api/runs/r/settings")
    defaults = {key: reply["resolved"][key] for key in reply["resolved"].keys() - reply["settings"].keys()}
    assert defaults == {
        "trainer.algorithm": "grpo",
        "bridge.kind": "broadcast",
        "environments.gsm8k.max_new_tokens": 400,
    }


def test_the_recipe_the_bridge_and_the_learning_rate_are_listed(run: Path) -> None:
    for words, recipe in (
        (["atropos", "train", "gsm8k_lora", "--steps", "5"], "gsm8k_lora"),
        (["__main__.py", "quickstart"], "quickstart"),
        (["atropos", "train", "mine/my_run.yaml"], "my_run"),
        (["atropos", "train", "--resume", "r"], None),
        (["atropos"], None),
    ):
        (run / "run.json").write_text(json.dumps({"starts": [{"command": words}]}))
        (run / "run.yaml").write_text("bridge: {kind: lora}\ntrainer: {lr: 1.0e-4}\n")
        (found,) = get(client(run), "/api/runs")["runs"]
        assert (found["recipe"], found["bridge"], found["lr"]) == (recipe, "lora", 1e-4)


@pytest.mark.parametrize("odd", ["[1]", "fast", "{a: 1}", ".nan", "true"])
def test_settings_of_another_kind_are_not_taken_for_numbers_and_names(run: Path, odd: str) -> None:
    (run / "run.yaml").write_text(f"bridge: {{kind: [{odd}]}}\ntrainer: {{lr: {odd}}}\n")
    window = client(run)
    (found,) = get(window, "/api/runs", sort="model")["runs"]
    assert (found["bridge"], found["lr"]) == (None, None)
    assert get(window, "/api/runs/r/settings")["facts"]


def test_the_best_policy_is_listed_and_the_start_is_none(run: Path) -> None:
    rows = [(0, "a", 0.9), (5, "a", 0.5), (5, "b", 0.75), (10, "a", 0.25), (10, "b", None)]
    lines = ({"env": env, "policy_version": version, "accuracy": accuracy} for version, env, accuracy in rows)
    write_rows(run / "evaluations.jsonl", lines)
    (found,) = get(client(run), "/api/runs")["runs"]
    assert found["best"] == {"accuracy": 0.625, "version": 5}
    reply = get(client(run), "/api/runs/r/evaluations")
    assert reply["versions"] == [[0, 0.9], [5, 0.625], [10, 0.25]]
    assert reply["apart"] == {"a": [[0, 0.9], [5, 0.5], [10, 0.25]], "b": [[5, 0.75]]}
    assert (reply["before"], reply["best"]["version"], reply["last"]["version"]) == (0.9, 5, 10)


def test_runs_are_searched_and_sorted(tmp_path: Path) -> None:
    for name, lr, tags in (("first", 0.1, ["baseline"]), ("second", 0.2, []), ("third", 0.3, ["Sweep"])):
        path = make_run(tmp_path / name)
        (path / "run.yaml").write_text(f"steps: 3\ntrainer: {{lr: {lr}}}\n")
        (path / "notes.json").write_text(json.dumps({"note": f"the {name} of three", "tags": tags}))
        write_rows(path / "metrics.jsonl", [metrics_row(3) | {"reward_mean": None if name == "second" else lr}])
    (tmp_path / "third" / "run.yaml").write_text("steps: 9\n")
    window = client(parent=tmp_path)

    def names(**query: str) -> list[str]:
        return [run["run"] for run in get(window, "/api/runs", **query)["runs"]]

    assert names(sort="run") == ["first", "second", "third"]
    assert names(sort="-run") == ["third", "second", "first"]
    assert names(sort="reward") == ["third", "first", "second"]  # without a value: last, both ways
    assert names(sort="-reward") == ["first", "third", "second"]
    assert names(q="sweep") == names(q="THIRD three") == ["third"]
    assert sorted(names(q="finished")) == ["first", "second"]
    assert names(q="nowhere") == []
    assert len(names(sort="size")) == 3


def test_a_comparison_leaves_places_out_and_shows_defaults(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        path = make_run(tmp_path / name)
        vllm, trainer = f"{{port: {9000 + number}, max_model_len: 256}}", ("{lr: 0.1}", "{lr: 0.1, kl_coef: 0.05}")
        (path / "run.yaml").write_text(f"trainer: {trainer[number]}\nvllm: {vllm}\nmodel: /models/x\nseed: 7\n")
        (path / "trainer.yaml").write_text(
            f"lr: 0.1\nkl_coef: {0.05 * number}\nsave_path: /runs/{name}\nclip_eps: 0.{number}\n"
        )
    reply = client(tmp_path / "a", tmp_path / "b").get("/api/compare?run=a&run=b&run=nobody").json()
    assert reply["runs"] == ["a", "b"]
    assert [setting for setting in reply["differing"] if setting["name"] != "model"] == [
        {"name": "trainer.kl_coef", "values": [0.0, 0.05], "defaults": [True, False]}
    ]
    assert reply["compared"] == 5  # commit and port say where a run was; nobody chose clip_eps


def test_a_comparison_shows_what_the_launcher_gave_to_vllm_as_a_default(tmp_path: Path) -> None:
    given = "[--dtype, float32, --max-model-len, '256', --gpu-memory-utilization, '0.5', --enable-lora, --port, '9001']"
    for name, chosen in (
        ("a", "{}"),
        ("b", "{dtype: bfloat16, vllm: {max_model_len: 256, gpu_memory_utilization: 0.5}}"),
    ):
        path = make_run(tmp_path / name)
        (path / "run.yaml").write_text(f"{chosen}\n")
        (path / "vllm.yaml").write_text(f"{given}\n")
    reply = client(tmp_path / "a", tmp_path / "b").get("/api/compare?run=a&run=b").json()
    assert [setting for setting in reply["differing"] if setting["name"] != "model"] == [
        {"name": "dtype", "values": ["float32", "bfloat16"], "defaults": [True, False]}
    ]
    (tmp_path / "a" / "vllm.yaml").write_text(f"[--enable-lora, --seed, '{'9' * 400}']\n")
    resolved = get(client(tmp_path / "a"), "/api/runs/a/settings")["resolved"]
    assert (resolved["vllm.enable_lora"], resolved["vllm.seed"]) == (True, "9" * 400)  # no browser has such a number


def test_the_head_of_a_run_has_its_settings_and_its_details(run: Path) -> None:
    start = {"command": ["atropos", "train", "gsm8k", "--name", "a b"], "model": "/models/Qwen2.5-1.5B", "seed": 3}
    machine = {"host": "lab", "cores": 8, "memory_bytes": 16 * 2**30, "gpus": ["H100", "H100"]}
    (run / "run.json").write_text(json.dumps({"starts": [start | {"machine": machine}]}))
    (run / "trainer.yaml").write_text("algorithm: dr_grpo\nlr: 0.1\nbridge: {kind: lora}\n")
    reply = get(client(run), "/api/runs/r/settings")
    assert dict(reply["facts"]) == {
        "Model": "Qwen2.5-1.5B",
        "Recipe": "gsm8k",
        "Environment": "gsm8k",
        "Bridge": "lora",
        "Learning rate": 0.1,
        "Algorithm": "dr_grpo",
        "Seed": 3,
    }
    details = dict(reply["details"])
    assert details["Command"] == "atropos train gsm8k --name 'a b'"
    assert details["Machine"] == "lab, 8 cores, 16 GiB of memory, H100, H100"
    assert details["trainer.algorithm"] == "dr_grpo"


def test_each_environment_has_its_means_by_step(run: Path) -> None:
    write_rows(run / "samples.jsonl", [sample(90, 1, env="tools", scores=[0.5, 1.0]), sample(91, 1, scores=None)], "a")
    found = get(client(run), "/api/runs/r/environments")["apart"]
    assert found == {"gsm8k": [[1, 0.5], [2, 0.5], [3, 0.5]], "tools": [[2, 0.75]]}
    assert get(client(run), "/api/runs/r/groups")["environments"] == ["gsm8k", "tools"]


def test_logs_are_shown_by_service_without_control_characters(run: Path) -> None:
    (run / "link.log").symlink_to("/etc/passwd")
    window = client(run)
    assert get(window, "/api/runs/r/logs") == {"services": ["trainer"], "lines": []}
    assert get(window, "/api/runs/r/logs", service="trainer", lines=2)["lines"] == ["two\\x1b[31m", "three"]
    for service in ("link", "../r/trainer", "/etc/passwd", "trainer\0"):
        assert window.get("/api/runs/r/logs", params={"service": service}).status_code == 404


def test_an_integer_of_more_than_64_bits_is_shown(run: Path) -> None:
    lines = [{"version": 10**30, "metrics": {"a": 2**64, "b": -(2**70), "c": [10**400]}}]
    (run / "evaluations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for path in ("/api/runs/r/evaluations", "/api/runs/r/metrics", "/api/runs"):
        assert client(run).get(path).status_code == 200, path


HUGE = "1" + "0" * 400  # no float is as large
SPOILED = [
    ("metrics.jsonl", f'{{"step": 1, "reward_mean": {HUGE}, "time": {HUGE}}}\n'),
    ("evaluations.jsonl", f'{{"policy_version": {HUGE}, "accuracy": {HUGE}}}\n'),
    ("evaluations.jsonl", f'{{"policy_version": 1, "accuracy": {HUGE}}}\n'),
    ("held_out.jsonl", f'{{"policy_version": 1, "score": {HUGE}, "messages": []}}\n'),
    ("samples.jsonl", f'{{"scores": [{HUGE}], "generation_params": {{"seed": {HUGE}}}}}\n'),
    ("run.json", f'{{"starts": [{{"seed": {HUGE}, "planned_steps": {HUGE}, "machine": {{"memory_bytes": {HUGE}}}}}]}}'),
    ("run.yaml", f"trainer: {{lr: 0x{'f' * 500}}}\n"),
    ("run.yaml", f"environments: {{? 0x{'f' * 5000} : {{}}}}\n"),
    ("run.yaml", 'environments: {"\\ud800": {}}\n'),
    ("run.yaml", 'trainer: {lr: "\\ud800"}\n'),
]


@pytest.mark.parametrize(("name", "content"), SPOILED)
def test_numbers_and_texts_that_nothing_can_hold_spoil_no_list(run: Path, name: str, content: str) -> None:
    (run / name).write_text(content)
    window = client(run, make_run(run.parent / "other"))
    listed = get(window, "/api/runs", sort="-reward")["runs"]
    assert {found["run"] for found in listed} == {"r", "other"}
    problems = [problem for found in listed for problem in found["problems"]]
    if name == "run.yaml":
        (problem,) = problems
        assert problem.startswith("run.yaml cannot be read: a value that cannot be read as ")
    for route in ROUTES[1:-1]:
        get(window, f"/api/runs/r{route}")


def test_a_directory_whose_name_is_no_text_is_shown_among_the_others(run: Path) -> None:
    make_run(run.parent / os.fsdecode(b"no\xfftext"))
    window = client(run, run.parent / os.fsdecode(b"no\xfftext"))
    assert [found["run"] for found in get(window, "/api/runs")["runs"]] == ["r", "no?text"]


def test_dead_letters_are_read_from_the_journal_which_stays_as_it_is(run: Path) -> None:
    import sqlite3

    create(run / "rollouts.db", b"id")
    body = json.dumps({"tokens": tokens_of(1), "masks": tokens_of(1), "scores": [1, 0], "inference_logprobs": "?"})
    with sqlite3.connect(run / "rollouts.db") as db:
        add = "INSERT INTO dead_letters VALUES (?, ?, NULL, ?, ?, ?, 0, ?)"
        db.execute(add, (1, 5.0, "gsm8k", "it has no log-probabilities", 0, body.encode()))
        db.execute(add, (2, 6.0, "tools", "its bytes are damaged", 1, b"\xc1"))
    db.close()
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    window, path = client(run), "/api/runs/r/groups"
    found = get(window, path, source="dead_letters")
    assert [(row["n"], row["error"]) for row in found["rows"]] == [
        ("2", "its bytes are damaged"),
        ("1", "it has no log-probabilities"),
    ]
    assert get(window, path, source="dead_letters", q="LOG-prob")["total"] == 1
    assert get(window, path, source="dead_letters", env="tools")["total"] == 1
    letter = get(window, f"{path}/1", source="dead_letters")
    assert (letter["error"], letter["env"], letter["time"]) == ("it has no log-probabilities", "gsm8k", 5.0)
    assert [rollout["score"] for rollout in letter["rollouts"]] == [1.0, 0.0]
    assert get(window, f"{path}/2", source="dead_letters")["rollouts"] == []
    assert window.get(f"{path}/3", params={"source": "dead_letters"}).status_code == 404
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("number", ["'x'", "NULL", "1.5", "x'ff'"])
def test_a_dead_letter_of_somebody_else_without_a_number_is_listed(run: Path, number: str) -> None:
    import sqlite3

    with sqlite3.connect(run / "rollouts.db") as db:
        db.execute("CREATE TABLE dead_letters (id, at, env_id, environment, reason, packed, crc, body)")
        db.execute(f"INSERT INTO dead_letters VALUES ({number}, 1.0, 1, 'gsm8k', 'why', 0, 0, x'7b7d')")
    db.close()
    found = get(client(run), "/api/runs/r/groups", source="dead_letters")
    assert [(row["n"], row["error"]) for row in found["rows"]] == [("0", "why")]


def test_a_journal_that_cannot_be_read_is_said(run: Path) -> None:
    (run / "rollouts.db").write_bytes(b"no database" * 1000)
    found = get(client(run), "/api/runs/r/groups", source="dead_letters")
    assert found["problem"].startswith("rollouts.db cannot be read: ")
    (run / "rollouts.db").unlink()
    (run / "rollouts.db").symlink_to("/etc/passwd")
    assert "link" in get(client(run), "/api/runs/r/groups", source="dead_letters")["problem"]


def damage_with(text: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.write_text(text)

    return damage


def make_link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/passwd")


def make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


FILES = [
    "run.json",
    "run.yaml",
    "metrics.jsonl",
    "evaluations.jsonl",
    "samples.jsonl",
    "trained.jsonl",
    "held_out.jsonl",
]
ODD = "step=x step=-1 step=1e3 min_score=nan max_score=inf sort=size source=x dropped=maybe offset=-1 limit=a limit=٣"
DAMAGES = [damage_with("\0\n{[\n"), damage_with("[" * 50_000), make_link, make_pipe, make_folder, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=["bytes", "deep", "link", "pipe", "directory", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_whatever_one_file_is_the_others_are_shown(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(run / name)
    window, started = client(run), time.monotonic()
    for route in ROUTES[:-1]:
        reply = window.get(f"/api/runs{route and '/r' + route}")
        assert reply.status_code in (200, 404), reply.text
        assert "root:" not in reply.text
    assert time.monotonic() - started < 20  # nobody waits for a pipe
    assert get(window, "/api/runs")["runs"][0]["run"] == "r"


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/nobody/metrics",
        "/api/runs/../r/metrics",
        "/api/runs/..%2f..%2fetc/metrics",
        "/api/runs/r/groups/samples.1",  # in the middle of a row
        "/api/runs/r/groups/samples.999999",
        "/api/runs/r/groups/trained.0",
        "/api/runs/r/groups/..%2f..%2fmetrics.0",
        "/api/runs/r/groups/samples.-1",
        "/api/runs/r/groups/samples.٣",
        "/api/runs/r/groups/" + "9" * 30,
        "/api/runs/r/groups/samples." + "9" * 30,
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/view.html/",
        "/static/server.py",
        "/docs",
        "/openapi.json",
    ],
)
def test_what_is_not_there_is_404(run: Path, path: str) -> None:
    assert client(run).get(path).status_code == 404


@pytest.mark.parametrize(
    "query",
    ["step=" + "9" * 40, *ODD.split()],
)
def test_an_impossible_parameter_is_named(run: Path, query: str) -> None:
    reply = client(run).get(f"/api/runs/r/groups?{query}")
    assert reply.status_code == 422
    assert query.partition("=")[0] in reply.json()["detail"]


@pytest.mark.parametrize("query", ["offset=999999999999999", "limit=999999999", "q=" + "%00" * 300, "q=%22%5C", "env="])
def test_odd_parameters_are_answered(run: Path, query: str) -> None:
    assert client(run).get(f"/api/runs/r/groups?{query}").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_but_get_is_answered(run: Path, method: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/r/groups"):
        assert client(run).request(method, path).status_code == 405
    if method != "PUT":  # test_notes.py
        assert client(run).request(method, "/api/runs/r/notes").status_code == 405


def test_pages_of_others_get_nothing(run: Path) -> None:
    window = client(run)
    for headers in (
        {"Host": "evil.test:8400"},
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert window.get("/api/runs", headers=headers).status_code == 403
    assert window.get("/api/runs", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_every_reply_forbids_what_a_page_must_not_do(run: Path) -> None:
    window = client(run)
    for path in ("/", "/api/runs", "/static/view.js", "/nowhere", "/api/runs/nobody/metrics"):
        headers = window.get(path, headers={"Origin": "http://127.0.0.1"}).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not any(name.startswith("access-control") for name in headers)
    assert "content-security-policy" in window.get("/", headers={"Host": "evil.test"}).headers


def test_the_page_and_its_files_are_served(run: Path) -> None:
    window = client(run)
    page = window.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in sorted(server.PAGE.glob("*")):
        reply = window.get(f"/static/{path.name}")
        assert reply.content == path.read_bytes()
        assert reply.headers["content-type"].partition(";")[0] == server.TYPES[path.suffix]


def test_nothing_is_written(run: Path) -> None:
    def found() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}

    before, window = found(), client(run)
    for route in ROUTES:
        get(window, f"/api/runs{route and '/r' + route}")
    assert found() == before
