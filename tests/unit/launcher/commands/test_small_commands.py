"""The smaller commands: evaluate, plot, env."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_launcher.cli import main
from atropos_launcher.commands import evaluate
from atropos_launcher.commands.env import defines_alone
from atropos_launcher.commands.existing_runs import plot
from atropos_launcher.plan.sections import environment_program, no_program
from atroposlib.flags import ConfigError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.launcher.plans import ROOT, no_processes, plan
from tests.unit.trainer.fakes import model_folder

__all__ = ["no_processes"]


@pytest.mark.usefixtures("no_processes")
def test_an_evaluation_is_vllm_and_the_environments_alone() -> None:
    made = plan("two_environments", "--bridge", "broadcast")
    vllm, first, second = evaluate.evaluation_services(made)
    assert (vllm.name, first.name, second.name) == ("vllm", "gsm8k", "letters")
    assert "evaluate" in first.command
    assert "serve" not in first.command
    folder = "/run/evaluation_gsm8k"
    assert first.command[-4:] == ("--env.data_dir_to_save_evals", folder, "--output", f"{folder}/answers.jsonl")
    assert (first.may_end, first.restarts) == (True, 0)
    assert "trainer.yaml" not in evaluate.evaluation_files(made)


@pytest.mark.usefixtures("no_processes")
def test_an_evaluation_of_another_server_starts_none() -> None:
    made = plan("arithmetic", "--env.openai.base_url", "http://elsewhere:9001/v1")
    assert [service.name for service in evaluate.evaluation_services(made)] == ["env"]


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("gpus", "vllm"), [([], "vLLM: KV cache"), (["--gpus", "1x80"], "Each GPU of vLLM")])
def test_the_plan_of_an_evaluation_has_no_trainer(
    gpus: list[str], vllm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["arithmetic", "Qwen/Qwen2.5-0.5B", "--dry-run", *gpus]
    assert evaluate.main(words) == 0
    told = capsys.readouterr().out
    assert vllm in told
    assert evaluate.main([*words, "--base-url", "http://elsewhere:9001/v1"]) == 0
    of_other = capsys.readouterr().out
    assert "Memory" not in of_other
    of_training = ("trainer: gradients", "of the trainer", "Checkpoints", "Time of a step")
    assert not [words for words in of_training if words in told + of_other]


@pytest.mark.usefixtures("no_processes")
def test_every_environment_is_told_how_to_sample() -> None:
    given = evaluate.EvaluateFlags(samples=4, top_p=0.9)
    *_, first, second = evaluate.evaluation_services(plan("two_environments", "--bridge", "broadcast"), given)
    for service in (first, second):
        assert service.command[-6:-1] == ("--samples", "4", "--top-p", "0.9", "--output")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base-url", "http://x/v1"], "name the model as that server does: atropos evaluate RECIPE MODEL"),
        (["gpt", "--api-key-env", "KEY"], "--api-key-env is for --base-url"),
        (["gpt", "--base-url", "x"], "--base-url: String should match"),
    ],
)
def test_an_evaluation_of_another_server_names_model_and_address(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate.main(["arithmetic", *words])


@pytest.mark.parametrize(
    "flag",
    ["--bridge=lora", "--no-wandb", "--steps=4", "--trainer.lr=1e-5", "--bridge.bucket-mb=8", "--teacher.model=m"],
)
def test_an_evaluation_refuses_flags_that_only_training_has_and_offers_none(flag: str) -> None:
    told = evaluate.parser().format_help()
    assert "--env.X" in told
    assert re.split("[=.]", flag.replace("--no-", "--"))[0] not in told
    with pytest.raises(ConfigError, match="is about training, which an evaluation does not do: leave it out"):
        evaluate.main(["arithmetic", flag, "--dry-run"])


@pytest.mark.usefixtures("no_processes")
def test_an_evaluation_does_not_take_the_place_of_a_training_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/mine"
    run.mkdir(parents=True, mode=0o700)
    (run / "run.yaml").write_text("base: arithmetic.yaml\n")
    (run / "trainer.yaml").touch()
    with pytest.raises(ConfigError, match="mine is a training run; choose another --run-name"):
        evaluate.main(["arithmetic", "--run-name", "mine", "--dry-run"])
    with pytest.raises(ConfigError, match="mine is a training run; give its run file instead") as refused:
        evaluate.main(["--resume", "mine", "--dry-run"])
    (file,) = str(refused.value).rpartition("atropos evaluate ")[2].split()
    assert evaluate.main([file, "--dry-run"]) == 0
    assert "/runs/evaluate-run-auto-greedy/" in capsys.readouterr().out


async def evaluated(*words: str, **variables: str) -> str:
    """What `atropos evaluate` prints with these words, in a process of its own."""
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos_launcher", "evaluate", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
        cwd=ROOT,
    )
    said = (await asyncio.wait_for(done.communicate(), 300))[0].decode()
    assert done.returncode == 0, said
    return said


@pytest.mark.services
@pytest.mark.slow
async def test_a_model_behind_an_api_is_evaluated_by_a_recipe(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: "It is 5.", api_key="secret", model_name="gpt") as server:
        words = ["arithmetic", "gpt", "--base-url", server.base_url, "--api-key-env", "MY_KEY", "--run-name", "api"]
        words += ["--samples", "2", "--env.heldout_size", "3", "--runs", str(tmp_path)]
        said = await evaluated(*words, MY_KEY="secret")
        assert (server.hits["/v1/chat/completions"], server.hits["/generate"]) == (6, 0)
    results = tmp_path / "api/evaluation_env"
    assert (results / "table.txt").read_text() in said
    assert "  questions, samples, failed  3 6 0\n" in said
    assert "Results of env: " in said
    assert "/api/evaluation_env/\n" in said
    assert len((results / "samples.jsonl").read_text().splitlines()) == 7
    assert (results / "samples.html").is_file()
    assert all("secret" not in path.read_text() for path in (tmp_path / "api").rglob("*") if path.is_file())


@pytest.mark.rotating
@pytest.mark.services
@pytest.mark.slow
async def test_the_same_evaluation_again_pays_for_nothing(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: "It is 5.", model_name="org/gpt") as server:
        words = ["arithmetic", "org/gpt", "--base-url", server.base_url, "--env.heldout_size", "3"]
        words += ["--runs", str(tmp_path), "--samples"]
        await evaluated(*words, "2")
        assert "and continues there" in await evaluated(*words, "2")
        assert server.hits["/v1/chat/completions"] == 6
        await evaluated(*words, "3")
        assert server.hits["/v1/chat/completions"] == 9, "only the third sample of each question"
        await evaluated(*words, "1", "--output", str(tmp_path / "mine.jsonl"))
        assert server.hits["/v1/chat/completions"] == 12
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 4
    samples = tmp_path / "evaluate-arithmetic-org-gpt/evaluation_env/samples.jsonl"
    assert len(samples.read_text().splitlines()) == 10


@pytest.mark.rotating
@pytest.mark.services
@pytest.mark.slow
async def test_the_same_greedy_evaluation_again_pays_for_nothing(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: "It is 5.", model_name="org/gpt") as server:
        words = ["arithmetic", "org/gpt", "--base-url", server.base_url, "--env.heldout_size", "3"]
        words += ["--runs", str(tmp_path)]
        first = await evaluated(*words)
        again = await evaluated(*words)
        assert "and continues there" in again
        assert server.hits["/v1/chat/completions"] == 3
        await evaluated(*words, "--output", str(tmp_path / "mine.jsonl"))
        assert server.hits["/v1/chat/completions"] == 6
    tables = [
        [line for line in text.splitlines() if line.startswith("  ") and "seconds" not in line]
        for text in (first, again)
    ]
    assert tables[0] == tables[1]
    folder = tmp_path / "evaluate-arithmetic-org-gpt-greedy/evaluation_env"
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 4
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 4


@pytest.mark.services
def test_an_output_is_for_the_answers_of_one_environment(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    with pytest.raises(ConfigError, match=r"--output \S+mine.jsonl is for one environment"):
        evaluate.evaluation_services(plan("two_environments", "--bridge", "broadcast"), output=mine)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        run = tmp_path / name
        run.mkdir()
        (run / "trainer.log").touch()
        rows = [{"step": step, "reward_mean": step / 4} for step in range(4)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def test_a_run_is_drawn_by_its_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main(["one", "--runs", str(runs)]) == 0
    assert (runs / "one/reward.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{runs / 'one/reward.png'}\n"


def test_several_runs_are_compared(runs: Path) -> None:
    assert plot.main([str(runs / "one"), str(runs / "two"), "--out", str(runs / "compare.png")]) == 0
    assert (runs / "compare.png").stat().st_size > 0


def test_a_run_without_a_step_cannot_be_drawn(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("/dev/null", runs / "one/metrics.jsonl")
    assert plot.main(["one", "--runs", str(runs)]) == 1
    assert "has no rows yet" in capsys.readouterr().err
    (runs / "one/metrics.jsonl").unlink()
    assert plot.main(["one", "--runs", str(runs)]) == 1
    assert "no step is done yet" in capsys.readouterr().err


def launcher(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atropos_launcher", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


@pytest.mark.services
@pytest.mark.parametrize("file", ["gsm8k", "environments/gsm8k_server.py", "environments.gsm8k_server"])
def test_env_is_the_environments_own_command(file: str) -> None:
    done = launcher("env", file, "serve", "--env.group_size", "7", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "\n  group_size: 7\n" in done.stdout


def test_a_module_in_the_working_directory_is_an_environment_whatever_starts_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as the script `atropos` has it
    (tmp_path / "my_project/envs").mkdir(parents=True)
    (tmp_path / "my_project/envs/mine.py").touch()
    assert environment_program("my_project.envs.mine") == ("-m", "my_project.envs.mine")
    assert environment_program("my_project.envs.other") is None
    assert environment_program("my_project/envs/mine") is None


@pytest.mark.services
def test_an_environment_that_is_not_there_is_one_line() -> None:
    done = launcher("env", "xyz", "serve")
    assert done.returncode == 2
    assert "there is no file or module 'xyz'; give the path of its .py file, or one of agent, calculator" in done.stderr
    assert len(done.stderr.splitlines()) == 1


NAMES_NOTHING = "import logging\nlog = logging.getLogger()\n"
DEFINES = f'"""Mine."""\n{NAMES_NOTHING}class MyEnv:\n    def cli(self):\n        print(3)\n'


@pytest.mark.parametrize(
    ("source", "alone"),
    [
        (DEFINES, True),
        (f"{DEFINES}if __name__ == '__main__':\n    MyEnv.cli\n", True),
        (f"{DEFINES}def main():\n    MyEnv.cli()\n", True),
        (f"{DEFINES}if __name__ == '__main__':\n    MyEnv.cli()\n", False),
        (f"{DEFINES}print(3)\nlogging.basicConfig(level=3)\nsys.path.insert(0, str(3))\n", True),
        (f"{DEFINES}print(MyEnv.cli())\n", False),
        (f"{DEFINES}try:\n    import torch\nfinally:\n    main()\n", False),
        (f"{DEFINES}raise SystemExit(MyEnv.cli())\n", False),
        (f"{DEFINES}status = MyEnv.cli()\n", False),
        (f"{DEFINES}for each in range(3):\n    status = asyncio.run(each)\n", False),
        (f"{NAMES_NOTHING}from my_env import *\n", False),
        (f"{DEFINES}class\n", False),
        ("\0", False),
        ("", True),
    ],
)
def test_a_program_that_defines_an_environment_and_runs_none_is_told_from_others(
    tmp_path: Path, source: str, alone: bool
) -> None:
    (tmp_path / "mine.py").write_text(source)
    assert defines_alone(tmp_path / "mine.py") is alone


def test_an_environment_that_its_program_does_not_run_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(DEFINES)
    with pytest.raises(SystemExit) as ended:
        main(["env", str(tmp_path / "mine.py"), "process"])
    assert ended.value.code == 2
    said = 'mine.py runs no environment: end it with `MyEnv.cli(default_command="serve")`\n'
    assert capsys.readouterr().err == f"atropos env: error: {tmp_path}/{said}"


def test_an_environment_that_was_written_here_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_server.py").touch()
    assert no_program("mine") == "there is no file or module 'mine'; did you mean mine_server.py?"


@pytest.mark.services
@pytest.mark.slow
def test_fine_tuning_is_the_trainer_alone(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", vocab_size=300)
    save_tiny_tokenizer(Path(model))
    (tmp_path / "rows.jsonl").write_text('{"prefix": "2+2=", "completion": "4."}\n{"completion": "5."}\n')
    words = [str(tmp_path / "rows.jsonl"), "--model", model, "--out", str(tmp_path / "out"), "--training-steps", "2"]
    done = launcher("fine-tune", *words, "--batch-size", "1", "--gradient-accumulation-steps", "2")
    assert done.returncode == 0, done.stderr
    assert "Step 2/2 | sft loss " in done.stdout
    assert (tmp_path / "out/final_model/model.safetensors").is_file()
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2="}\n')
    done = launcher("fine-tune", *words)
    assert done.returncode == 1
    assert "rows.jsonl:1 has no pos but question" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("words", [["verify", "gone"], ["reproduce", "gone"], ["reproduce", "plain", "--step", "1"]])
def test_a_run_that_cannot_be_compared_is_not_one_that_differs(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "run.json").write_text("{}")
    (plain / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit) as ended:
        main([*words, "--runs", str(tmp_path)])
    assert ended.value.code == 2
    assert f"atropos {words[0]}: error: " in capsys.readouterr().err
