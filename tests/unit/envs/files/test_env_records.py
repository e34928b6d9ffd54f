import json
import os
from pathlib import Path
from typing import Any

import pytest

from atroposlib.compat.commands.jsonl2html import generate_html
from atroposlib.envs.errors import RecordError
from atroposlib.envs.evaluation.evaluation import Evaluation, evaluate_version, evaluations_file, finite_numbers
from atroposlib.envs.files.html_report import write_html
from atroposlib.envs.files.records import JsonlWriter, append_line, crossed
from atroposlib.envs.metrics import Durations, JsonlSink, length_metrics, open_wandb


def test_existing_group_file_is_kept_and_the_next_gets_a_number(tmp_path: Path) -> None:
    paths = []
    for _ in range(3):
        writer = JsonlWriter(tmp_path / "groups.jsonl")
        writer.write({"scores": [1.0]})
        writer.close()
        paths.append(writer.path.name)
    assert paths == ["groups.jsonl", "groups_1.jsonl", "groups_2.jsonl"]


def test_full_disk_is_named_and_leaves_whole_lines() -> None:
    class Full:
        """A file with room for ten bytes."""

        name = "groups.jsonl"

        def __init__(self) -> None:
            self.content = b""

        def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
            assert (offset, whence) in [(0, os.SEEK_END), (len(self.content) - 1, os.SEEK_SET)]
            return len(self.content)

        def read(self, count: int) -> bytes:
            return self.content[-count:]

        def write(self, data: bytes) -> int:
            room = 10 - len(self.content)
            self.content += data[:room]
            return min(room, len(data))

        def truncate(self, size: int) -> None:
            self.content = self.content[:size]

    file = Full()
    append_line(file, {"a": 1})  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"cannot write 8 bytes to groups.jsonl: No space left on device; free space"):
        append_line(file, {"b": 2})  # type: ignore[arg-type]
    assert file.content == b'{"a":1}\n'


@pytest.mark.parametrize(
    ("old", "new", "multiple"), [(0, 4, None), (0, 5, 5), (4, 5, 5), (5, 6, None), (3, 17, 15), (5, 5, None)]
)
def test_crossed_multiple(old: int, new: int, multiple: int | None) -> None:
    assert crossed(old, new, 5) == multiple


def test_interval_that_is_off_is_never_crossed() -> None:
    assert crossed(0, 10, 0) is None
    assert crossed(0, 10, -1) is None


def test_html_escapes_what_models_say(tmp_path: Path) -> None:
    group = {
        "messages": [
            [{"role": "user", "content": "<script>alert(1)</script>"}],
            [{"role": "u", "content": [{"type": "image"}]}],
        ],
        "scores": [1.0, -1.0],
    }
    (tmp_path / "g.jsonl").write_text(json.dumps(group) + "\n")
    write_html(tmp_path / "g.jsonl", tmp_path / "g.html")
    page = (tmp_path / "g.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "Group 0: 2 samples, mean score 0.000" in page
    assert "score -1" in page


@pytest.mark.parametrize(("rows", "page"), [("g.jsonl", "g.jsonl"), ("g.html", "g.html"), ("g.jsonl", "other.jsonl")])
def test_a_page_never_takes_the_place_of_rows(tmp_path: Path, rows: str, page: str) -> None:
    text = json.dumps({"messages": [[{"role": "user", "content": "?"}]], "scores": [1.0]}) + "\n"
    for name in {rows, page}:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"would be replaced by the page|has the rows themselves"):
        generate_html(str(tmp_path / rows), str(tmp_path / page))
    assert {name: (tmp_path / name).read_text() for name in {rows, page}} == dict.fromkeys({rows, page}, text)


def test_the_page_of_process_opens_one_group_with_its_question(tmp_path: Path) -> None:
    def group(question: str) -> dict[str, object]:
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        said = [[*asked, {"role": "assistant", "content": answer}] for answer in ("It is 42.", "It is 41.", "Half.")]
        return {"messages": said, "scores": [1.0, 0.0, 0.5], "reference": "42"}

    groups = [group("What is\n6 < 7?"), group("word " * 100)]
    (tmp_path / "g.jsonl").write_text("".join(json.dumps(each) + "\n" for each in groups))
    write_html(tmp_path / "g.jsonl", tmp_path / "g.html")
    page = (tmp_path / "g.html").read_text()
    assert page.count("<details open>") == 1
    title = "<summary>Group 0: 3 samples, mean score 0.500<span class=question>What is 6 &lt; 7?</span></summary>"
    assert f"<details open>{title}<p class=role>Reference</p><pre>42</pre>" in page
    assert page.count("<pre>What is\n6 &lt; 7?</pre>") == 1  # and not once per answer
    assert page.count("<pre>Be brief.</pre>") == 2
    assert [sign in page for sign in ("✓ score 1", "✗ score 0", "◐ score 0.5")] == [True] * 3
    assert f"<span class=question>{'word ' * 31}…</span>" in page


def test_the_page_shows_the_answers_that_have_no_score_too(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}] for answer in "bcd"]
    lost = {"cause": "scorer", "error": "it has <no> score", "messages": said[2]}
    never = {"cause": "timeout", "error": "late", "messages": None}
    row = {"messages": said[:2], "scores": [1.0, 0.0], "rewards": [{"x": 1.0}, None], "failures": [lost, never]}
    (tmp_path / "g.jsonl").write_text(json.dumps(row) + "\n")
    write_html(tmp_path / "g.jsonl", tmp_path / "g.html")
    page = (tmp_path / "g.html").read_text()
    assert "Group 0: 2 samples and 1 without a score, mean score 0.500" in page
    assert "<summary>? no score: scorer: it has &lt;no&gt; score</summary>" in page
    assert page.count("<pre>d</pre>") == 1


def test_answers_that_begin_differently_keep_their_whole_conversations(tmp_path: Path) -> None:
    said = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "c"}],
    ]
    (tmp_path / "g.jsonl").write_text(json.dumps({"messages": said, "scores": [1.0, 0.0]}) + "\n")
    write_html(tmp_path / "g.jsonl", tmp_path / "g.html")
    page = (tmp_path / "g.html").read_text()
    assert "question>" not in page.partition("</style>")[2]
    assert [page.count(f"<pre>{text}</pre>") for text in "abc"] == [1, 1, 1]


async def test_accuracy_is_read_where_environments_put_it() -> None:
    async def evaluate() -> dict[str, object]:
        return {"eval/percent_correct": 0.25, "note": "text", "nan": float("nan")}

    evaluation = await evaluate_version(evaluate, policy_version=4, served_version=5)
    assert evaluation.accuracy == 0.25
    assert evaluation.metrics == {"eval/percent_correct": 0.25}
    assert evaluation.line().startswith("Held-out accuracy 25.0 % at policy version 4 (with version 5 served) (")


@pytest.mark.parametrize("accuracy", ["50%", 50.0, -0.1, float("nan")])
async def test_an_accuracy_that_is_no_share_is_told(accuracy: object, caplog: pytest.LogCaptureFixture) -> None:
    async def evaluate() -> dict[str, object]:
        return {"accuracy": accuracy}

    await evaluate_version(evaluate, policy_version=4, served_version=4)
    assert f"evaluate gave accuracy {accuracy!r}: give a number from 0 to 1" in caplog.text


def test_evaluation_line_has_count_and_decoding() -> None:
    evaluation = Evaluation(5, 5, 0.75, {"correct": 48.0, "total": 64.0, "temperature": 0.0}, 3.42)
    assert evaluation.line() == "Held-out accuracy 75.0 % (48/64) at policy version 5 (greedy, 3.4 s)"


def test_numbers_of_numpy_count() -> None:
    import numpy as np

    none: dict[Any, Any] = {7: 1, "c": np.zeros(3), "e": np.array(None), "f": 10**400}
    assert finite_numbers({"a": np.float32(0.5), "b": np.int64(2), "d": True, **none}) == {
        "7": 1.0,
        "a": 0.5,
        "b": 2.0,
        "d": 1.0,
    }


def test_evaluations_file_follows_the_configuration() -> None:
    assert evaluations_file(None, None) is None
    assert evaluations_file(None, "d") == Path("d/evaluations.jsonl")
    assert evaluations_file("x.jsonl", "d") == Path("x.jsonl")


def test_metrics_file_holds_numbers(tmp_path: Path) -> None:
    import numpy as np

    sink = JsonlSink(tmp_path / "new/m.jsonl")
    sink.write({"a": 1.5, "b": np.float32(0.5), "c": np.int64(2), "table": object()}, step=3)
    sink.close()
    row = json.loads((tmp_path / "new/m.jsonl").read_text())
    assert (row["step"], row["a"], row["b"], row["c"]) == (3, 1.5, 0.5, 2)
    assert "table" not in row


def test_durations_are_handed_over_once() -> None:
    durations = Durations()
    durations.add("x", 1.0)
    durations.add("x", 3.0)
    assert durations.take() == {"x_mean": 2.0, "x_std": 1.0, "x_max": 3.0, "x_min": 1.0}
    assert durations.take() == {}


def test_length_figures() -> None:
    figures = length_metrics([10, 96, 98], 100)
    assert figures["train/completion_lengths"] == 68.0
    assert figures["train/completion_lengths_p95"] == pytest.approx(2 / 3)
    assert length_metrics([], 100) == {}


async def test_wandb_without_a_project_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert await open_wandb("env", None, "", {}) is None
    assert [record.message for record in caplog.records] == ["W&B is off: the trainer named no project"]


async def test_missing_wandb_is_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert await open_wandb("env", None, "project", {}) is None
    assert "W&B is off: the package wandb is not installed" in caplog.text
    assert len(caplog.records) == 1


def test_data_whose_directory_is_no_longer_written_to_is_one_line(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "groups/data.jsonl")
    writer.write({"a": 1})
    (tmp_path / "groups").rename(tmp_path / "moved")
    writer.write({"a": 2})  # in a new directory
    (tmp_path / "groups").rename(tmp_path / "moved again")
    (tmp_path / "groups").touch()
    with pytest.raises(RecordError, match=r"cannot write to .*data.jsonl: .*; free space, or write elsewhere"):
        writer.write({"a": 3})
