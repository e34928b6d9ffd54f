"""reward.png from a run's files."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

from example_trainer import plot


def write_rows(path: Path, rows: list[dict[str, float | None]], unfinished: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + unfinished)
    return path


def test_draws_a_png_from_metrics_and_evaluations(tmp_path: Path) -> None:
    metrics = write_rows(
        tmp_path / "metrics.jsonl",
        [{"step": n, "policy_version": n, "reward_mean": n / 5, "accuracy": None} for n in (1, 2, 3)],
        '{"st',
    )
    evaluations = write_rows(
        tmp_path / "evaluations.jsonl",
        [{"policy_version": 0, "accuracy": 0.2}, {"policy_version": 3, "accuracy": None}],
    )
    out = tmp_path / "figures" / "reward.png"
    assert plot.main([str(metrics), "--evaluations", str(evaluations), "--out", str(out)]) == 0
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert out.stat().st_size > 5000


def test_without_evaluations_the_accuracies_of_the_metrics_are_drawn(tmp_path: Path) -> None:
    metrics = write_rows(
        tmp_path / "metrics.jsonl", [{"step": 1, "policy_version": 1, "reward_mean": 0.5, "accuracy": 0.25}]
    )
    assert plot.main([str(metrics), "--out", str(tmp_path / "reward.png")]) == 0
    assert (tmp_path / "reward.png").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        ("", "has no rows yet"),
        ('{"step": 1, "policy_version": 1, "sft_loss": 0.5}\n', "has no rewards: it is of a run that samples nothing"),
    ],
)
def test_nothing_to_draw_is_one_line(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    if content is not None:
        metrics.write_text(content)
    assert plot.main([str(metrics), "--out", str(tmp_path / "reward.png")]) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "reward.png").exists()


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, float | None]] = [{"step": 1, "policy_version": 1, "reward_mean": 0.5, "accuracy": 0.25}]
    whole = write_rows(tmp_path / "metrics.jsonl", rows)
    assert plot.main([str(whole), "--out", "/dev/full"]) == 1
    cut = write_rows(tmp_path / "cut.jsonl", rows, '{"st\n{}\n')
    assert plot.main([str(cut), "--out", str(tmp_path / "reward.png")]) == 1
    assert plot.main([str(whole), "--evaluations", str(cut), "--out", str(tmp_path / "reward.png")]) == 1
    written, *read = capsys.readouterr().err.splitlines()
    assert written.startswith("plot: error: cannot write /dev/full: it is a device")
    assert [line.partition(": Unterminated")[0] for line in read] == [f"plot: error: cannot read {cut}"] * 2


def test_several_runs_are_compared_by_their_folders(tmp_path: Path) -> None:
    files = []
    for run in ("broadcast", "lora"):
        (tmp_path / run).mkdir()
        files.append(
            str(write_rows(tmp_path / run / "metrics.jsonl", [{"step": n, "reward_mean": n / 5} for n in (1, 2)]))
        )
    assert plot.main([*files, "--out", str(tmp_path / "compare.png")]) == 0
    assert (tmp_path / "compare.png").stat().st_size > 5000


def drawn_labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of the curves, as soon as a plot is drawn."""
    labels: list[str] = []
    close = pyplot.close

    def note(figure: Any) -> None:
        labels.extend(str(line.get_label()) for line in figure.axes[0].get_lines())
        close(figure)

    monkeypatch.setattr(pyplot, "close", note)
    return labels


def test_runs_of_one_name_are_both_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for place in ("a", "b"):
        (tmp_path / place / "run").mkdir(parents=True)
        files.append(str(write_rows(tmp_path / place / "run/metrics.jsonl", [{"step": 1, "reward_mean": 0.5}])))
    labels = drawn_labels(monkeypatch)
    assert plot.main([*files, "--out", str(tmp_path / "compare.png")]) == 0
    assert labels == [str(tmp_path / "a/run"), str(tmp_path / "b/run")]


def test_each_environment_has_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = write_rows(tmp_path / "metrics.jsonl", [{"step": 1, "reward_mean": 0.5}])
    evaluations = tmp_path / "evaluations.jsonl"
    rows = [{"env": env, "policy_version": 0, "accuracy": 0.5} for env in ("sums", "letters")]
    evaluations.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    labels = drawn_labels(monkeypatch)
    assert plot.main([str(metrics), "--evaluations", str(evaluations), "--out", str(tmp_path / "reward.png")]) == 0
    assert labels[1:] == ["held-out accuracy of letters (greedy)", "held-out accuracy of sums (greedy)"]
