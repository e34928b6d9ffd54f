"""`teacher` of a run file: where its server is, what the other programs are told, and what is refused."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_launcher.commands import evaluate, train
from atropos_launcher.commands.train import expect_fit
from atropos_launcher.placement.teacher import TeacherPlace
from atropos_launcher.plan import site
from atropos_launcher.plan.sections import connection_of_teacher, expect_evaluations
from atropos_launcher.plan.services import Plan
from atropos_launcher.plan.site import find_model
from atropos_launcher.run_file.run_file import validated
from atropos_launcher.run_file.teacher import TeacherSection
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.commands.discovery import fill_in_models
from atroposlib.envs.commands.reporting import StartUp
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.flags import ConfigError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.launcher.plans import MODEL, ask_for, no_processes, on_gpus, plan

__all__ = ["no_processes"]
pytestmark = pytest.mark.usefixtures("no_processes")
DISTIL = ("--trainer.distill-coef", "1")
TAUGHT = ("--teacher.model", "org/big-7B", *DISTIL)
STUDENT = "org/model-1.5B"


def flag(made: Plan, service: str, name: str) -> str | None:
    (found,) = [each for each in made.services if each.name == service]
    words = found.command
    return words[words.index(name) + 1] if name in words else None


def gpus_of(made: Plan) -> dict[str, str]:
    found = {each.name: each.environment.get("CUDA_VISIBLE_DEVICES", "") for each in made.services}
    return {name: found[name] for name in ("vllm", "teacher", "trainer") if name in found}


def test_a_teacher_that_is_not_there_is_named_by_its_own_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, str]] = []

    def found(model: str | None, flag: str = "--model") -> str:
        asked.append((model, flag))
        return model or str(MODEL)

    monkeypatch.setattr(site, "find_model", found)
    plan("arithmetic", *TAUGHT)
    assert ("org/big-7B", "--teacher.model") in asked
    with pytest.raises(ConfigError, match=r"^--teacher\.model /nowhere has no config\.json"):
        find_model("/nowhere", "--teacher.model")


@pytest.mark.parametrize(("every", "is_refused"), [("0", True), ("5", False)])
def test_a_run_that_ends_when_it_is_flat_needs_evaluations(every: str, is_refused: bool) -> None:
    made = plan("arithmetic", "--trainer.stop-when-flat", "3", "--env.steps-per-eval", every)
    with pytest.raises(ConfigError, match="no environment evaluates") if is_refused else nullcontext():
        expect_evaluations(made.trainer, made.environments)


def test_a_teacher_is_served_beside_and_everyone_is_told() -> None:
    made = plan("arithmetic", *TAUGHT, "--trainer.distill-top-k", "40")
    names = [service.name for service in made.services]
    assert names.index("teacher") < names.index("trainer")
    assert (flag(made, "teacher", "--model"), flag(made, "teacher", "--port")) == ("org/big-7B", "9002")
    assert flag(made, "teacher", "--max-model-len") == "257"  # the longest sequence, and a token
    assert flag(made, "teacher", "--max-logprobs") == "40"
    (teacher,) = [service for service in made.services if service.name == "teacher"]
    assert teacher.health == "http://127.0.0.1:9002/health"
    assert teacher.environment["VLLM_ENABLE_SHARED_WEIGHTS"] == "0"
    assert teacher.restarts
    resolved = made.environments["env"].resolved
    assert resolved["env"]["teacher_enabled"] is True
    assert resolved["teacher"][0]["base_url"] == "http://127.0.0.1:9002/v1"
    told = resolved["teacher"][0]
    assert (told["server_type"], told["model_name"], told["tokenizer_name"]) == ("vllm", "default", "none")
    assert made.trainer.distill_coef == 1
    kept = yaml.safe_load(made.files["run.yaml"])
    assert kept["teacher"] == {"model": "org/big-7B"}
    assert "teacher_enabled" not in made.files["run.yaml"]  # it follows from `teacher`
    assert "HF_HUB_OFFLINE" not in teacher.environment  # the teacher comes from the hub


def test_a_teacher_that_runs_elsewhere_is_only_asked() -> None:
    made = plan("arithmetic", "--teacher.url", "http://gpu-7:9002/v1", "--teacher.tokenizer_name", "org/big", *DISTIL)
    assert "teacher" not in [service.name for service in made.services]
    (asked,) = made.environments["env"].resolved["teacher"]
    assert (asked["base_url"], asked["tokenizer_name"]) == ("http://gpu-7:9002/v1", "org/big")
    assert made.services[0].environment["HF_HUB_OFFLINE"] == "1"


async def test_the_teachers_server_is_asked_for_its_model_and_tokenizer(tmp_path: Path) -> None:
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    async with FakeInferenceServer(model_name="big", tokenizer_folder=tokenizer) as server:
        url = server.base_url.removesuffix("/v1")
        told = APIServerConfig(**connection_of_teacher(TeacherSection(url=url), TeacherPlace(url)))
        await fill_in_models(BaseEnvConfig(tokenizer_name=tokenizer), [told], StartUp("env"))
    assert (told.model_name, told.tokenizer_id) == ("big", tokenizer)


def test_a_checkpoint_teaches(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = plan("arithmetic", "--teacher.model", str(tmp_path), *DISTIL, "--teacher.port", "9100")
    assert (flag(made, "teacher", "--model"), flag(made, "teacher", "--port")) == (str(tmp_path), "9100")


def test_a_run_file_gives_the_teachers_flags(tmp_path: Path) -> None:
    run = {"base": "arithmetic", "teacher": {"model": "org/big", "max_num_seqs": 8}, "trainer": {"distill_coef": 0.5}}
    file = tmp_path / "taught.yaml"
    file.write_text(yaml.safe_dump(run))
    made = plan(str(file), "--teacher.dtype", "bfloat16")
    assert (flag(made, "teacher", "--max-num-seqs"), flag(made, "teacher", "--dtype")) == ("8", "bfloat16")


def test_every_copy_of_an_environment_asks_the_teacher() -> None:
    made = plan("arithmetic", *TAUGHT, "--env.count", "2")
    assert [each.resolved["env"]["teacher_enabled"] for each in made.environments.values()] == [True, True]


def test_the_teacher_has_cores_of_its_own_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    made = plan("arithmetic", *TAUGHT, "--layout.cores.vllm", "0-2", "--layout.cores.teacher", "4-5")
    (teacher,) = [service for service in made.services if service.name == "teacher"]
    assert teacher.cores == (4, 5)
    assert teacher.environment["VLLM_CPU_OMP_THREADS_BIND"] == "4-5"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--teacher.model org/big", r"teacher: nothing is learned from it .* --trainer.distill-coef 1, or remove"),
        ("--trainer.distill-coef 1", r"--trainer.distill-coef 1: the environment env asks no teacher.*--teacher.model"),
        ("--teacher.model m --teacher.url http://h:1", r"teacher: give `model`, .*, or `url`.*: one of the two"),
        ("--teacher.max_num_seqs 3", r"teacher: give `model`, .*, or `url`"),
        ("--teacher.url http://h:1 --teacher.max_num_seqs 3", r"max_num_seqs: flags of vLLM are for a teacher that is"),
        ("--teacher.url h:1", r"teacher.url: .*should match pattern.*got 'h:1'"),
        (
            "--teacher.model m --trainer.distill-coef 1 --teacher.max_model_len 256",
            r"teacher.max_model_len 256: the teacher reads sequences of up to 256 tokens .*: give 257 or more",
        ),
        (
            "--teacher.model m --trainer.distill-coef 1 --vllm.port 9001 --teacher.port 9001",
            r"teacher.port 9001 is a vLLM server's too",
        ),
        (
            f"--trainer.offline-data {__file__} --trainer.offline-share 1",
            r"--trainer.offline-share 1 trains on offline data alone.*: use `atropos fine-tune`",
        ),
        ("--trainer.reward-coef 0", r"--reward-coef 0 leaves nothing to train on: give --distill-coef"),
    ],
)
def test_what_contradicts_itself_is_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train.main(["arithmetic", *flags.split(), "--dry-run"])


def test_an_environment_is_not_called_teacher() -> None:
    content: dict[str, Any] = {"environments": {"teacher": {"file": "gsm8k"}}}
    with pytest.raises(ConfigError, match="'teacher' is not a valid environment name"):
        validated(content, "mine.yaml")


def test_the_last_gpus_are_the_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0", "1", "2", "3"])
    asked = ("gsm8k", STUDENT, *TAUGHT)
    one = gpus_of(plan(*asked))
    assert one["teacher"] == "3"
    assert sorted(f"{one['vllm']},{one['trainer']}".split(",")) == ["0", "1", "2"]
    two = plan(*asked, "--teacher.tensor-parallel-size", "2")
    assert gpus_of(two) == {"vllm": "0", "teacher": "2,3", "trainer": "1"}
    assert flag(two, "teacher", "--tensor-parallel-size") == "2"
    named = gpus_of(plan(*asked, "--layout.teacher", "0"))
    assert named["teacher"] == "0"
    assert "0" not in f"{named['vllm']},{named['trainer']}".split(",")


def test_one_gpu_is_shared_only_where_it_is_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0"])
    asked = ("gsm8k", STUDENT, *TAUGHT)
    with pytest.raises(
        ConfigError, match=r"teacher: it takes 1 GPU.*visible GPUs are 0.*--teacher.url.*--layout.teach"
    ):
        plan(*asked)
    with pytest.raises(ConfigError, match=r"layout: where GPUs are named, say .* --teacher.gpu-memory-utilization"):
        plan(*asked, "--layout.teacher", "0")
    shared = plan(*asked, "--layout.teacher", "0", "--teacher.gpu_memory_utilization", "0.25")
    assert gpus_of(shared) == {"vllm": "0", "teacher": "0", "trainer": "0"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--layout.teacher 7", r"layout.teacher: there is no GPU 7; the visible GPUs are 0, 1, 2"),
        ("--layout.teacher 1,2", r"teacher.tensor_parallel_size 1 takes 1 GPU\(s\), but the teacher has 1, 2"),
    ],
)
def test_gpus_that_do_not_fit_the_teacher_are_refused(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, ["0", "1", "2"])
    with pytest.raises(ConfigError, match=message):
        plan("gsm8k", STUDENT, *TAUGHT, *flags.split())


def test_a_teacher_that_is_elsewhere_takes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0", "1"])
    assert gpus_of(plan("gsm8k", STUDENT, "--teacher.url", "http://h:1", *DISTIL)) == {"vllm": "0", "trainer": "1"}


def test_a_teacher_too_large_for_its_gpu_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0", "1", "2"])
    huge = ("gsm8k", STUDENT, "--teacher.model", "org/huge-70B", *DISTIL)
    with pytest.raises(
        ConfigError, match=r"the teacher needs 1\d\d.\d GB on each of 1 GPU\(s\), but a GPU has 80.0 GB"
    ):
        expect_fit(plan(*huge), ask_for(*huge))
    small = ("gsm8k", STUDENT, *TAUGHT)
    expect_fit(plan(*small), ask_for(*small))


def test_an_evaluation_starts_and_asks_no_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "taught.yaml"
    run.write_text("base: arithmetic\nteacher: {model: org/big-7B}\ntrainer: {distill_coef: 1}\n")
    assert evaluate.main([str(run), "--dry-run"]) == 0
    assert "teacher" not in capsys.readouterr().out.lower()
