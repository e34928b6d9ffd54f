"""The recipes: each makes a plan, and gives each program what its comment says."""

from pathlib import Path

import pytest
import yaml

from atropos_launcher.commands import train
from atropos_launcher.plan import site
from atropos_launcher.plan.command_line import description
from atropos_launcher.run_file.run_file import recipe_files
from atropos_launcher.run_file.servers import is_server
from atroposlib.api.settings import RunApiConfig
from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from example_trainer.settings.bridges import LAUNCHED, MODES
from example_trainer.settings.config import TrainerConfig
from tests.unit.launcher.plans import ROOT, ask_for, no_processes, on_gpus, plan, resolved

__all__ = ["no_processes"]

pytestmark = pytest.mark.usefixtures("no_processes")
RECIPES = [path.stem for path in recipe_files()]
BRIDGES = {
    "gsm8k_broadcast": "--weight-bridge-mode shared_vllm --use-shared-memory",
    "gsm8k_lora": "--weight-bridge-mode lora_only",
    "gsm8k_lora_restart": "--weight-bridge-mode lora_restart",
    "gsm8k_reload": "--weight-bridge-mode reload",
    "gsm8k_restart": "--weight-bridge-mode none",
    "gsm8k_single_copy": "--weight-bridge-mode shared_vllm --single-copy",
}


@pytest.mark.parametrize("gpus", [0, 1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_run(recipe: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, [str(index) for index in range(gpus)])
    if recipe == "two_servers" and gpus == 1:
        with pytest.raises(ConfigError, match="2 vLLM servers and a trainer need 3 GPUs"):
            plan(recipe)
        return
    made = plan(recipe)
    shown = train.described(made, ask_for(recipe))
    assert f"All output goes to {made.site.run_dir}/" in shown
    assert "# Memory of " in shown
    assert "KV cache" in shown
    assert {"api", "trainer"} <= {service.name for service in made.services}
    owned = MODES[made.run.kind].owns_vllm
    assert any(is_server(service.name) for service in made.services) != owned
    again = yaml.safe_load(shown)
    assert again == yaml.safe_load(made.files["run.yaml"])


NEEDY = """
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig

class NeedyConfig(QuestionEnvConfig):
    level: int

class Needy(QuestionEnv):
    name = "needy"
    env_config_cls = NeedyConfig
    async def training_item(self, number): return {"question": "1 + 1?", "answer": "2"}
    async def score(self, item, answer): return 1.0
"""


@pytest.mark.parametrize("given", ["flag", "file"])
def test_a_setting_without_a_default_is_the_runs_to_give(given: str, tmp_path: Path) -> None:
    (program := tmp_path / "needy_server.py").write_text(NEEDY)
    section = {"file": str(program), **({"level": 3} if given == "file" else {})}
    (run := tmp_path / "run.yaml").write_text(yaml.safe_dump({"bridge": "broadcast", "environments": {"e": section}}))
    made = plan(str(run), *(("--env.level", "3") if given == "flag" else ()))
    assert made.environments["env"].resolved["env"]["level"] == 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_program_reads_back_what_it_is_told(recipe: str, tmp_path: Path) -> None:
    made = plan(recipe, "--wandb", run_dir=tmp_path)
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    trainer, _ = resolve_config(TrainerConfig, ["--config", str(tmp_path / "trainer.yaml")], prog="grpo", env={})
    assert trainer == made.trainer
    assert trainer.use_wandb
    api, _ = resolve_config(RunApiConfig, ["--config", str(tmp_path / "api.yaml")], prog="run-api", env={})
    assert (api.port, api.journal) == (made.site.api_port, tmp_path / "rollouts.db")
    for service, environment in made.environments.items():
        again = resolved(environment.program[0], ("--config", str(tmp_path / f"{service}.yaml")))
        assert again == environment.resolved
        assert again["env"]["use_wandb"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_first_line_is_a_title_and_its_comment_the_help(recipe: str) -> None:
    title, blank, *_ = description(ROOT / f"recipes/{recipe}.yaml").splitlines()
    assert len(title) <= 95
    assert blank == ""


def test_a_recipe_with_settings_of_adamw_takes_the_optimizer_that_the_plan_advises() -> None:
    assert plan("quickstart").trainer.adam_betas == (0.9, 0.95)
    assert plan("quickstart", "--trainer.optimizer", "adafactor").trainer.optimizer == "adafactor"


@pytest.mark.parametrize("flag", ["--bridge", "--bridge.kind"])
def test_a_bridge_to_servers_that_people_start_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"bridge sglang: `atropos train` starts vLLM alone; .*docs/bridges\.md"):
        plan("gsm8k", flag, "sglang")


def test_every_bridge_has_its_recipe() -> None:
    kinds = {ask_for(recipe).run.kind for recipe in BRIDGES}
    assert kinds == set(LAUNCHED)


@pytest.mark.parametrize("recipe", BRIDGES)
def test_a_bridges_recipe_says_what_to_type_without_it(recipe: str) -> None:
    run = ask_for(recipe).run
    assert f"--weight-bridge-mode {MODES[run.kind].typed}" == BRIDGES[recipe]
    assert BRIDGES[recipe] in description(ROOT / f"recipes/{recipe}.yaml")
    assert "GPU" in description(ROOT / f"recipes/{recipe}.yaml")


@pytest.mark.parametrize("recipe", BRIDGES)
def test_arithmetic_is_the_quickstarts_task_by_every_bridge(recipe: str) -> None:
    other = plan(recipe, "--dataset", "arithmetic")
    task = other.environments["env"].resolved
    of_quickstart = {"steps_per_eval": 10, "group_size": 4, "max_num_workers_per_node": 48}
    of_quickstart |= {"ensure_scores_are_not_same": True, "max_items_per_batch": 48}
    assert plan("quickstart").environments["env"].resolved == task | {"env": task["env"] | of_quickstart}
    assert other.trainer.training_steps == 20
    assert (other.trainer.batch_size, other.trainer.gradient_accumulation_steps) == (8, 8)
    falling = (other.trainer.lr_by_signal, other.trainer.lr_decay_steps)
    assert falling == ((False, 6) if "lora" in recipe else (True, 0))


def test_a_single_copy_is_trained_where_vllm_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, where in ((1, "0"), (2, "0"), (3, "0,1")):
        on_gpus(monkeypatch, [str(index) for index in range(gpus)])
        seen = {
            service.name: service.environment.get("CUDA_VISIBLE_DEVICES")
            for service in plan("gsm8k_single_copy").services
        }
        assert (seen["vllm"], seen["trainer"], seen["env"]) == (where, where, None)


def test_a_trainer_that_owns_vllm_is_given_its_flags_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan("gsm8k_restart", "--dataset", "arithmetic").trainer.bridge.model_dump()
    assert alone["vllm_flags"].startswith("--dtype float32")
    assert alone["vllm_gpu"] is None
    assert alone["restart_interval"] == 1
    on_gpus(monkeypatch, ["0", "1"])
    made = plan("gsm8k_restart")
    assert made.trainer.bridge.model_dump()["vllm_gpu"] == "0"
    assert made.trainer.bridge.model_dump()["restart_interval"] == 10
    (trainer,) = [service for service in made.services if service.name == "trainer"]
    assert trainer.environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_two_environments_are_two_servers_with_files_of_their_own() -> None:
    made = plan("two_environments")
    assert list(made.environments) == ["gsm8k", "letters"]
    for name, environment in made.environments.items():
        assert environment.resolved["env"]["min_batch_allocation"] == 0.5
        assert environment.resolved["env"]["data_path_to_save_groups"] == f"/run/samples_{name}.jsonl"
        (service,) = [service for service in made.services if service.name == name]
        assert service.command[-1] == f"/run/{name}.yaml"
        assert service.may_end
        assert service.restarts == 3


def test_lora_on_24_gb_fits_by_arithmetic() -> None:
    made, asked = plan("lora_24gb", "--gpus", "1x24"), ask_for("lora_24gb", "--gpus", "1x24")
    train.expect_fit(made, asked)
    need = site.need_of(asked, made.site)
    assert need is not None
    verdict = need.verdict(made.site.placement)
    assert verdict.training.offload == "none"
    assert verdict.room.device < 15 * 10**9 < verdict.training.need + 10 * 10**9
