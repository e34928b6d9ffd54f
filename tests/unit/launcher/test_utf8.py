"""Names outside of ASCII work under the C locale."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.services
def test_paths_outside_of_ascii_work_under_the_c_locale(tmp_path: Path) -> None:
    model, data, runs = tmp_path / "modèle", tmp_path / "données.jsonl", tmp_path / "läufe 数"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    data.write_text(json.dumps({"question": "Où?", "answer": "4"}) + "\n", encoding="utf-8")
    words = ["train", "gsm8k", "--model", str(model), "--dataset-path", str(data), "--runs", str(runs), "--dry-run"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-m", "atropos_launcher", *words],
        capture_output=True,
        timeout=120,
        check=False,
        env=environment | C_LOCALE,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    said = done.stdout.decode()
    assert f"model: {model}" in said or str(model) in said
    assert str(data) in said
    assert "läufe 数" in said
