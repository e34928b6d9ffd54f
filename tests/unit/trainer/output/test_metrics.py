"""What the trainer keeps of a step, and what it does when it cannot."""

import json
from pathlib import Path

import pytest

from example_trainer.errors import TrainerError
from example_trainer.output.metrics import JsonlSink


def test_a_resumed_run_drops_the_rows_it_will_write_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    sink = JsonlSink(path, first_step=3)
    sink.write({"step": 3, "loss": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("line", [b"}", b"[]", b'{"loss": 1}', b'{"step": "3"}', b"\xff}", b"[" * 100_000, b"{}"])
def test_a_file_that_holds_no_rows_is_one_line_and_left_as_it_was(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(TrainerError, match=r"metrics.jsonl:2 is not a row of metrics .* --metrics-path") as refused:
        JsonlSink(path, first_step=3)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == b'{"step": 1}\n' + line + b"\n"
