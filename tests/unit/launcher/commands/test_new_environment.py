"""`atropos env new`: the files it writes run as they are, and what it refuses."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_launcher import cli
from atropos_launcher.commands.new_environment import new_environment
from atropos_launcher.paths import environments
from tests.unit.launcher.plans import ROOT

TEMPLATES = sorted(environments().glob("*template_server.py"))
KINDS = {"template_server.py": [], "two_turn_template_server.py": ["--turns", "two"]}
KINDS |= {"tool_template_server.py": ["--tool"]}


def test_every_template_can_be_asked_for() -> None:
    assert [path.name for path in TEMPLATES] == sorted(KINDS)


@pytest.mark.rotating
@pytest.mark.services
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_written_test_passes_as_written(kind: str, tmp_path: Path) -> None:
    assert cli.main(["env", "new", "my_task", *KINDS[kind], "--dir", str(tmp_path / "mine")]) == 0
    done = run(tmp_path / "mine", "-m", "pytest", "-q", "test_my_task_server.py")
    assert "3 passed" in done.stdout


@pytest.mark.services
@pytest.mark.slow
def test_the_written_test_notices_a_wrong_score(tmp_path: Path) -> None:
    cli.main(["env", "new", "my_task", "--dir", str(tmp_path)])
    server = tmp_path / "my_task_server.py"
    text = server.read_text()
    assert text.count("== str(max(item))") == 1
    server.write_text(text.replace("== str(max(item))", "== str(min(item))"))
    done = run(tmp_path, "-m", "pytest", "-q", "test_my_task_server.py", code=1)
    assert "test_a_right_answer_scores_1" in done.stdout
    assert "2 failed, 1 passed" in done.stdout


def run(cwd: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_class_configuration_and_name_are_called_after_it(template: Path) -> None:
    made = new_environment("word_count_2", template.read_text())
    assert made.module == "word_count_2_server"
    classes = [node.name for node in ast.parse(made.source).body if isinstance(node, ast.ClassDef)]
    assert classes[-2:] == ["WordCount2Config", "WordCount2Env"]
    assert '    name = "word_count_2"\n' in made.source
    assert "    env_config_cls = WordCount2Config\n" in made.source
    assert "    WordCount2Env.cli(" in made.source
    assert "A template" not in made.source


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "My-Task",
            "NAME 'My-Task': use lowercase letters, digits and underscores, a letter first, at most 40 characters",
        ),
        ("My-Task", "; for example my_task"),
        ("2nd", "; for example nd"),
        ("../x", "NAME '../x': use lowercase"),
        ("a" * 41, f"; for example {'a' * 40}"),
        ("", "NAME '': use lowercase"),
        ("question", "its class would be called QuestionEnv, as one of Atropos is"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["env", "new", name, "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["my_task_server.py", "test_my_task_server.py"])
def test_nothing_is_written_over(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / file).write_text("mine")
    with pytest.raises(SystemExit):
        cli.main(["env", "new", "my_task", "--dir", str(tmp_path)])
    assert f"{tmp_path / file} exists already; choose another NAME, or another directory with --dir" in (
        capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "mine"


def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        cli.main(["env", "new", "my_task", "--dir", str(tmp_path / "file/below")])
    assert f"cannot write to {tmp_path / 'file/below'}: Not a directory; choose another" in capsys.readouterr().err


def test_it_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["atropos-env", "new", "my_task"])
    assert cli.env() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my_task_server.py", "test_my_task_server.py"]


def test_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["env", "--help"])
    assert "atropos env new NAME" in capsys.readouterr().out
