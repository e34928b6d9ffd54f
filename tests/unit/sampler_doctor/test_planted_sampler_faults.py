"""The sampler doctor finds each planted fault by its row's name, and none where there is none."""

import json
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.commands import doctor
from sampler_doctor.__main__ import main
from sampler_doctor.reference import Reference, Words
from sampler_doctor.report import Row
from sampler_doctor.rows.catalogue import NAMES, STALE
from sampler_doctor.rows.session import ANSWER, PROMPT_TOKENS, Session
from sampler_doctor.rows.tokens import seed, several
from sampler_doctor.run import Doctor
from sampler_doctor.servers.completions import Completions
from sampler_doctor.servers.sampler import Answer, Ask, NotOffered, NotShown, Sampler
from sampler_doctor.settings import SamplerConfig
from tests.serving import Asked, Reply
from tests.unit.sampler_doctor.faulty_server import ADAPTER, FAULTS, FaultySampler, Style, serve
from tests.unit.sampler_doctor.tiny import save_adapter, save_model

Models = dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    model = save_model(folder / "model", 0)
    return {
        "model": model,
        "other": save_model(folder / "other", 1),
        "adapter": save_adapter(folder / "adapter", model),
    }


def rows_of(models: Models, fault: str, *names: str, style: Style = "vllm", update: bool = False) -> list[Row]:
    with serve(FaultySampler(models["model"], models["adapter"], fault), style) as server:
        config = SamplerConfig(
            sampler=server.url,
            model=str(models["model"]),
            rows=names,
            sampler_dtype="float32",
            adapter=f"{ADAPTER}={models['adapter']}",
            update=str(models["other"]) if update else None,
        )
        return list(Doctor(config).rows())


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.startswith("update")])
def test_a_planted_fault_is_found_by_its_row(fault: str, models: Models) -> None:
    assert [(row.name, row.result) for row in rows_of(models, fault, FAULTS[fault])] == [(FAULTS[fault], "fails")]


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.startswith("update")])
def test_a_fault_of_an_update_is_found_after_it(fault: str, models: Models) -> None:
    rows = rows_of(models, fault, FAULTS[fault], update=True)
    assert [row.result for row in rows if not row.after] == ([] if FAULTS[fault] == STALE else ["ok"])
    assert [(row.name, row.result) for row in rows if row.after] == [(FAULTS[fault], "fails")]


def test_a_penalty_is_not_shown_by_answers_in_which_no_token_can_come_again(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler_doctor.rows.parameters.ANSWER", 1)
    assert [row.result for row in rows_of(models, "", "frequency_penalty")] == ["not shown"]


@pytest.mark.services
@pytest.mark.parametrize(
    ("after", "update", "why"),
    [
        ("exit 3", None, "--after exit 3: exit status 3"),
        ("echo $$ > {}/pid; sleep 600; true", None, "true: it was ended after 1 s"),
        ("true", "{}/no/such/model", "--update {}/no/such/model is no directory"),
    ],
)
def test_an_update_that_fails_costs_no_row_before_it(
    after: str, update: str | None, why: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler_doctor.run.COMMAND_S", 1.0)
    receipt = tmp_path / "receipt.json"
    flags = ["--rows", "distribution", "--receipt", str(receipt), "--after", after.format(tmp_path)]
    flags += [] if update is None else ["--update", update.format(tmp_path)]
    with serve(FaultySampler(models["model"], models["adapter"], "")) as server:
        assert main(["--sampler", server.url, "--model", str(models["model"]), *flags]) == 1
    told = json.loads(receipt.read_text())["rows"]
    assert [(row["name"], row["result"]) for row in told] == [("distribution", "ok"), ("update", "fails")]
    assert why.format(tmp_path) in told[1]["figure"]
    if (started := tmp_path / "pid").exists():
        assert not Path(f"/proc/{started.read_text().strip()}").exists()


def test_a_route_that_wants_another_key_costs_its_own_row_alone(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = FaultySampler.reply

    def reply(self: FaultySampler, asked: Asked, style: Style) -> Reply:
        is_update = any(word in asked.path for word in ("update", "reload", "rpc"))
        return Reply(status=403) if is_update else answer(self, asked, style)

    monkeypatch.setattr(FaultySampler, "reply", reply)
    for style in ("vllm", "sglang"):
        first, second = rows_of(models, "", "distribution", style=style, update=True)
        assert (first.result, second.name, second.result) == ("ok", "update", "not offered")
        assert "answers 403: set VLLM_API_KEY to the server's key" in second.figure


@pytest.mark.slow
@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_no_row_fails_without_a_fault(style: Style, models: Models) -> None:
    rows = rows_of(models, "", style=style, update=True)
    assert [row for row in rows if row.result != "ok"] == []
    assert {row.name for row in rows} == set(NAMES)
    assert len(rows) == 2 * (len(NAMES) - 1) + 1


def test_a_run_gives_the_server_little_work(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model of 135M parameters on two cores takes a minute. A prompt is computed once per draw."""
    asked: list[Ask] = []
    answer = Completions.sample

    def counted(self: Completions, ask: Ask) -> list[Answer]:
        asked.append(ask)
        return answer(self, ask)

    monkeypatch.setattr(Completions, "sample", counted)
    rows_of(models, "")
    times = [int(ask.options.get("n", 1)) for ask in asked]
    assert sum(n * len(ask.prompt) for n, ask in zip(times, asked, strict=True)) < 9_000
    assert sum(n * ask.tokens for n, ask in zip(times, asked, strict=True)) < 2_000


def test_what_a_plain_server_lacks_is_no_failure(models: Models) -> None:
    rows = {row.name: row for row in rows_of(models, "", *(name for name in NAMES if name != "batch"), style="openai")}
    assert [row for row in rows.values() if row.result == "fails"] == []
    assert rows["distribution"].result == "ok"
    assert "the 5 most probable of 258" in rows["distribution"].figure
    assert rows["top_k"].result == rows["stop token"].result == "not offered"


def test_the_exit_status_is_1_and_the_receipt_has_the_figure(
    models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    receipt = tmp_path / "receipt.json"
    with serve(FaultySampler(models["model"], models["adapter"], "n: one answer many times")) as server:
        flags = ["--sampler", server.url, "--model", str(models["model"]), "--receipt", str(receipt)]
        assert main([*flags, "--rows", "n,seed"]) == 1
        assert main([*flags, "--rows", "seed"]) == 0
        assert main([*flags, "--rows", "n", "--sampler-dtype", "float32"]) == 1
    shown = capfd.readouterr().out
    assert "fails       n " in shown
    assert "teach nothing" in shown
    content = json.loads(receipt.read_text())
    assert [(row["name"], row["result"]) for row in content["rows"]] == [("n", "fails")]
    assert 0 < content["rows"][0]["seconds"] <= content["seconds"]
    assert content["digest"].startswith("sha256:")
    assert server.url not in receipt.read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sampler", "http://127.0.0.1:9", "--model", "MODEL"], "start the server, or correct --sampler"),
        (
            ["--sampler", "http://127.0.0.1:9", "--model", "MODEL", "--rows", "nn"],
            "--rows nn is no check; there are: d",
        ),
        (["--sampler", "http://127.0.0.1:9"], "--model is required"),
    ],
)
def test_what_cannot_be_tested_is_one_line_and_status_2(
    flags: list[str], words: str, models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word.replace("MODEL", str(models["model"])) for word in flags])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


class Brief(Sampler):
    """Ends the answer to every prompt but one at its first token; to that one it gives the same answer each time."""

    def __init__(self, long: int) -> None:
        super().__init__("http://127.0.0.1:9", None, 1.0)
        self._long = long

    def sample(self, ask: Ask) -> list[Answer]:
        count = ANSWER if len(ask.prompt) == self._long else 1
        return [Answer([7] * count, [-1.0] * count, [{}] * count)] * int(ask.options.get("n", 1))

    def load(self, directory: str) -> str:
        raise NotOffered(directory)


@pytest.mark.parametrize("long", PROMPT_TOKENS)
def test_an_answer_that_ends_at_once_hides_no_repeated_one(long: int, models: Models) -> None:
    session = Session(Brief(long), Reference(models["model"]), Words(models["model"]), 384, "float32")
    assert several(session).result == "fails"
    assert seed(session).result == "fails"
    with pytest.raises(NotShown, match="so certain"):
        several(Session(Brief(0), session.reference, session.words, 384, "float32"))


class Listing(Completions):
    """A server that lists these models, or has no list."""

    def __init__(self, cards: list[dict[str, object]] | None) -> None:
        super().__init__("http://127.0.0.1:9", None, 1.0, dict)
        self.model = "mine"
        self._cards = cards

    def get(self, path: str) -> Any:
        if self._cards is None:
            raise NotOffered(path)
        return {"data": self._cards}


@pytest.mark.parametrize(
    ("cards", "longest"),
    [
        (None, None),
        ([], None),
        ([{"id": "other", "max_model_len": 5}, {"id": "mine", "max_model_len": 7}], 7),
        ([{"id": "root-of-mine", "max_model_len": 5}], 5),
        ([{"id": "mine"}], None),
    ],
)
def test_the_longest_sequence_is_that_of_the_served_model(
    cards: list[dict[str, object]] | None, longest: int | None
) -> None:
    assert Listing(cards).longest() == longest
    assert Listing(None).version() == "OpenAI-compatible"


@pytest.mark.services
@pytest.mark.slow
def test_atropos_doctor_tests_a_sampler_and_ends_with_its_status(models: Models, tmp_path: Path) -> None:
    with serve(FaultySampler(models["model"], models["adapter"], "seed: ignored")) as server:
        flags = ["--sampler", server.url, "--model", str(models["model"]), "--receipt", str(tmp_path / "r.json")]
        assert doctor.main([*flags, "--rows", "n"]) == 0
        assert doctor.main([*flags, "--rows", "n,seed", "--answer-s", "60"]) == 1
    assert doctor.main(["--sampler", server.url]) == 2


def test_the_page_names_every_row_and_a_fault_is_planted_for_each() -> None:
    page = (Path(__file__).parents[3] / "docs/test_your_sampler.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []
    assert {*FAULTS.values()} == {*NAMES}
    assert f"{len(FAULTS)} of {len(FAULTS)}" in page
    assert f"({2 * len(NAMES) - 1} rows each)" in page
