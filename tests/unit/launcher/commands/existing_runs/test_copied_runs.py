"""What `atropos status` says of a run directory that somebody sent."""

from pathlib import Path

import pytest

from atropos_launcher import runs


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '{"step": Infinity}'),
        ("metrics.jsonl", '{"step": NaN}'),
        ("metrics.jsonl", f'{{"step": 1{"0" * 400}}}'),
        ("metrics.jsonl", "[" * 50_000),
        ("evaluations.jsonl", f'{{"accuracy": 1{"0" * 400}}}'),
        ("run.json", "5"),
        ("run.json", "null"),
        ("run.json", "[" * 50_000),
    ],
)
def test_a_damaged_row_or_record_is_as_if_it_were_not_there(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "evaluations.jsonl").write_text('{"accuracy": 0.5}\n')
    with (tmp_path / name).open("a") as file:
        file.write(content + "\n")
    assert runs.outcome(tmp_path) == "ended after 3 steps, 50.0 %"


def test_a_record_that_is_a_device_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").symlink_to("/dev/zero")
    assert not runs.ended_well(tmp_path)
