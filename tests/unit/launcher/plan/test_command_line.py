"""The command line of `atropos train`: the run's flags, those of sections, and one line for what is wrong."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from atropos_launcher import cli
from atropos_launcher.commands import evaluate, quickstart, train
from atropos_launcher.placement import gpus
from atropos_launcher.plan.command_line import read_command_line
from atropos_launcher.runs import NoSuchRun
from atropos_launcher.service import AGENTS
from atroposlib.flags import ConfigError
from example_trainer.settings.bridges import Broadcast
from tests.unit.launcher.plans import ROOT, ask_for, no_processes, on_gpus, plan

__all__ = ["no_processes"]

WRONG = [
    (["--stepz", "3"], "unknown flag --stepz; did you mean 'steps'?"),
    (["--lr", "1e-5"], "unknown flag --lr; did you mean 'trainer.lr'?"),
    (["--learning-rate", "1e-5"], "unknown flag --learning-rate; did you mean 'trainer.lr'?"),
    (["--checkpoint-keep", "1"], "unknown flag --checkpoint-keep; did you mean 'trainer.keep_checkpoints'?"),
    (["--lora-rank", "8"], "unknown flag --lora-rank; did you mean 'trainer.lora_r'?"),
    (["--batch", "8"], "unknown flag --batch; did you mean 'trainer.batch_size'?"),
    (["--max-tokens", "8"], "unknown flag --max-tokens; did you mean 'env.max_new_tokens'?"),
    (["--max-steps", "8"], "unknown flag --max-steps; did you mean 'steps'?"),
    (["--training-steps", "8"], "unknown flag --training-steps; did you mean 'steps'?"),  # the trainer's is refused
    (["--modell", "x"], "unknown flag --modell; did you mean 'model'?"),
    (["--output-dir", "x"], "unknown flag --output-dir (--help all lists them)"),
    (["--checkpoints-keep", "1"], "unknown flag --checkpoints-keep; did you mean 'trainer.keep_checkpoints'?"),
    (["--group-size=4"], "unknown flag --group-size; did you mean 'env.group_size'?"),
    (["--bridge-sends", "direct"], "unknown flag --bridge-sends; did you mean 'trainer.bridge_sends'?"),
    (["--max-new-tokens", "64"], "unknown flag --max-new-tokens; did you mean 'env.max_new_tokens'?"),
    (["--max-model-len", "64"], "unknown flag --max-model-len; did you mean 'vllm.max_model_len'?"),
    (["--bridge-staging", "host"], "unknown flag --bridge-staging; did you mean 'vllm.bridge_staging'?"),
    (["--temperature", "1"], "unknown flag --temperature; did you mean 'env.temperature'?"),
    (["--no-overlap"], "unknown flag --no-overlap; did you mean 'trainer.no_overlap'?"),
    (["--steps", "0"], "--steps: Input should be greater than or equal to 1 (got '0')"),
    (["--steps"], "--steps expects a value"),
    (["--trainer-ranks", "two"], "--trainer-ranks: "),
    (["--seed=x"], "--seed: Input should be a valid integer"),
    (["--dataset", "mmlu"], "--dataset expects arithmetic or gsm8k, got 'mmlu'"),
    (["--dataset", "gsm8k", "--dataset-path", "."], "cannot be combined"),
    (["--dataset-path", "/nowhere.jsonl"], "--dataset-path /nowhere.jsonl does not exist"),
    (["--model", "/nowhere"], "--model /nowhere has no config.json"),
    (["one", "two"], "expected one MODEL, got 'one' and 'two'"),
    (
        ["--run-name", "my run"],
        "--run-name: a run's name has letters, digits, '_', '-' and '.', and",
    ),
    (["--dtype", "int8"], "dtype: Input should be 'auto', 'float32' or 'bfloat16' (got 'int8')"),
    (["--vllm-port=99999"], "--vllm-port: Input should be less than or equal to 65535 (got 99999)"),
    (["--bridge", "lorra"], "bridge 'lorra' is not one of "),
    (["--trainer.lrr", "1"], "trainer: unknown flag --lrr; did you mean 'lr'?"),
    (["--trainer.model_name", "x"], "trainer.model_name: `model` at the top of the run decides it"),
    (["--api.max_bodi_mb", "1"], "api: unknown flag --max_bodi_mb; did you mean 'max_body_mb'?"),
    (["--environments.mine.group_size", "1"], "the environments of this run are gsm8k"),
    (["--no-vllm.enable-lora"], "unknown flag --no-vllm.enable-lora; did you mean '--vllm.enable-lora false'?"),
    (["--env.file", "gsm8"], "there is no file or module 'gsm8'; did you mean 'gsm8k'?"),
    (["--layout.trainer", "0"], "layout names GPUs, but this machine shows none"),
    (["--bridge.lora_r", "8"], "bridge.lora_r"),
    (["--host-memory", "256"], "--host-memory is only for --dry-run; a run uses the memory that this machine has"),
    (["--gpus", "8xH100"], "--gpus: write their number, at most 99, and the GB of one: 8x80; 8 means eight of 80 GB"),
    (["--gpus", "0x80"], "(got '0x80')"),
    (["--host-memory", "0"], "--host-memory: Input should be greater than or equal to 1 (got '0')"),
]


@pytest.mark.parametrize("command", [["train", "gsm8k"], ["quickstart"]])
@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_a_wrong_command_line_is_one_line_and_status_2(
    command: list[str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def shown_by(*argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_help_has_the_eight_flags_of_a_newcomer_and_all_has_every_one(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ("--model", "--steps", "--dataset", "--dataset-path", "--bridge", "--run-name", "--resume", "--gpus")
    sections = ("--dry-run", "--trainer.lr", "--trainer.X", "--env.X")
    short = shown_by("train", recipe, "--help", capsys=capsys)
    assert short.startswith("usage: atropos train RECIPE|FILE.yaml [MODEL]")
    begin = short.partition("\nTo begin with:\n")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^  (--\S+)", begin, re.MULTILINE)) == first
    shown = shown_by("train", recipe, "--help", "all", capsys=capsys)
    for flag in (*first, "--seed", "--batch-invariant", "--dtype", "--api-port", "--vllm-port", *sections):
        assert f"\n  {flag}" in shown, flag
        assert (f"\n  {flag}" in short) == (flag in (*first, *sections)), flag


@pytest.mark.parametrize("command", ["quickstart", "evaluate"])
def test_other_commands_begin_with_eight_flags_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    begin = shown_by(command, "--help", capsys=capsys).partition("\nTo begin with:\n")[2].partition("\n\n")[0]
    assert len(re.findall(r"^  --", begin, re.MULTILINE)) == 8


def test_help_of_the_quickstart_asks_for_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        quickstart.main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: atropos quickstart [MODEL] [--FLAG VALUE ...]\n")


def test_a_model_may_stand_alone() -> None:
    assert ask_for("gsm8k", "org/model").run.model == "org/model"
    assert ask_for("gsm8k", "--batch-invariant", "org/model").run.model == "org/model"
    assert ask_for("gsm8k", "--steps", "3", "org/model").run.model == "org/model"
    assert ask_for("gsm8k", "--wandb", "false", "org/model").run.wandb is False


@pytest.mark.usefixtures("no_processes")
def test_a_sections_flag_is_the_programs_own() -> None:
    made = plan(
        *"arithmetic --trainer.lr 1e-3 --trainer.advantage group_mean --bridge.bucket-mb 8".split(),
        *"--api.max_body_mb=7 --env.group_size 16 --env.openai.timeout 30 --vllm.enforce_eager".split(),
        *"--vllm.max_model_len 512".split(),
    )
    assert made.trainer.lr == 1e-3
    assert made.trainer.advantage == "group_mean"
    assert made.trainer.mode(Broadcast).bucket_mb == 8
    environment = made.environments["env"].resolved
    assert environment["env"]["group_size"] == 16
    assert environment["openai"][0]["timeout"] == 30
    (vllm,) = [service for service in made.services if service.name == "vllm"]
    assert "--enforce-eager" in vllm.command
    assert vllm.command[vllm.command.index("--max-model-len") + 1] == "512"
    assert "max_body_mb: 7" in made.files["api.yaml"]


@pytest.mark.usefixtures("no_processes")
def test_a_run_that_samples_off_policy_masks_tokens_unless_told_otherwise() -> None:
    off_policy = ["arithmetic", "--env.max_batches_offpolicy", "1"]
    assert plan("arithmetic").trainer.importance == "none"
    assert plan(*off_policy).trainer.importance == "mask"
    assert "importance: mask" in plan(*off_policy).files["trainer.yaml"]
    assert plan(*off_policy, "--trainer.importance", "none").trainer.importance == "none"
    assert plan(*off_policy, "--trainer.importance=truncate").trainer.importance == "truncate"


@pytest.mark.usefixtures("no_processes")
def test_the_kept_run_repeats_it(tmp_path: Path) -> None:
    flags = "--trainer.lr 1e-3 --bridge.bucket-mb 8 --api.max_body_mb=7 --env.group_size 16 --vllm.enforce_eager"
    made = plan("arithmetic", "--env.openai.timeout", "30", "--steps", "3", *flags.split())
    (tmp_path / "run.yaml").write_text(made.files["run.yaml"])
    assert plan(str(tmp_path / "run.yaml")).files == made.files


@pytest.mark.usefixtures("no_processes")
def test_a_setting_in_a_tree_of_an_environment_is_kept_with_the_run(tmp_path: Path) -> None:
    text = (ROOT / "environments/template_server.py").read_text()
    text = text.replace("    largest: int", "    data: DatasetConfig = DatasetConfig(name='main')\n    largest: int")
    mine = tmp_path / "my_server.py"
    mine.write_text(
        text.replace("from pydantic", "from atroposlib.envs.data.dataset import DatasetConfig\nfrom pydantic")
    )
    made = plan("arithmetic", "--env.file", str(mine), "--env.data.source", "my.csv")
    (tmp_path / "run.yaml").write_text(made.files["run.yaml"])
    again = plan(str(tmp_path / "run.yaml"))
    for environment in (made.environments["env"], again.environments["env"]):
        assert environment.resolved["env"]["data"]["source"] == "my.csv"
        assert environment.resolved["env"]["data"]["name"] == "main"


@pytest.mark.usefixtures("no_processes")
def test_an_environment_of_ones_own_takes_what_it_knows_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "my_server.py"
    monkeypatch.chdir(tmp_path)
    mine.write_text((ROOT / "environments/template_server.py").read_text())
    made = plan("arithmetic", "--env.file", "my_server.py", "--env.largest", "50")
    assert f"file: {mine}\n" in made.files["run.yaml"]  # which may be read from anywhere
    assert list(made.run.environments) == ["my"]
    environment = made.environments["env"]
    assert environment.program == (str(mine),)
    assert environment.resolved["env"]["group_size"] == 8
    assert environment.resolved["env"]["largest"] == 50
    assert "dataset" not in environment.resolved["env"]
    assert "HF_HUB_OFFLINE" not in made.services[0].environment  # nobody has said that it needs no hub


@pytest.mark.usefixtures("no_processes")
def test_several_of_one_environment_have_seeds_of_their_own_and_one_evaluates() -> None:
    made = plan("arithmetic", "--env.count", "2", "--seed", "5")
    first, second = (plan.resolved["env"] for plan in made.environments.values())
    assert list(made.environments) == ["gsm8k_0", "gsm8k_1"]
    assert (first["seed"], second["seed"]) == (5, 6)
    assert (first["steps_per_eval"], second["steps_per_eval"]) == (5, 0)
    assert second["eval_at_start"] is False


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("letter_counting", "letter_counting"),
        ("environments/letter_counting_server.py", "letter_counting"),
        ("gsm8k", "gsm8k"),
        ("vllm_server.py", "gsm8k"),  # which a service is called
        ("my words_server.py", "gsm8k"),
    ],
)
def test_an_environment_of_another_file_is_called_by_it(file: str, name: str) -> None:
    run = ask_for("arithmetic", "--env.count", "2", "--env.file", file).run
    assert {each: section.count for each, section in run.environments.items()} == {name: 2}


def test_two_environments_of_one_file_stay_two() -> None:
    first, second = ask_for("two_environments").run.environments
    files = [word for name in (first, second) for word in (f"--environments.{name}.file", "countdown")]
    assert list(ask_for("two_environments", *files).run.environments) == ["countdown", second]


@pytest.mark.usefixtures("no_processes")
def test_the_order_of_an_environments_flags_changes_nothing() -> None:
    other, count = ["--env.file", "environments/letter_counting_server.py"], ["--env.count", "2"]
    assert ask_for("arithmetic", *count, *other).run == ask_for("arithmetic", *other, *count).run


@pytest.mark.parametrize("section", ["vllm", "trainer", "layout", "api"])
def test_no_flag_hides_a_section_of_the_file_that_is_none(tmp_path: Path, section: str) -> None:
    (tmp_path / "run.yaml").write_text(f"base: arithmetic\n{section}: 5\n")
    flags = ["--vllm.max_model_len", "64", "--tp-size", "2", "--layout.trainer", "0", "--api-port", "5"]
    with pytest.raises(ConfigError, match=f"{section}: expected keys and values"):
        ask_for(str(tmp_path / "run.yaml"), *flags)


@pytest.mark.usefixtures("no_processes")
def test_env_is_ambiguous_where_there_are_several() -> None:
    with pytest.raises(ConfigError, match=r"this one has gsm8k, letters: say --environments.gsm8k.group_size"):
        plan("two_environments", "--env.group_size", "4")
    made = plan("two_environments", "--environments.letters.group_size", "4")
    assert made.environments["letters"].resolved["env"]["group_size"] == 4


@pytest.mark.usefixtures("no_processes")
def test_a_secret_of_the_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("base: arithmetic.yaml\ntrainer: {atropos_token: 0123456789abcdef0123}")
    with pytest.raises(ConfigError, match=r"trainer.atropos_token: a run keeps no secrets"):
        plan(str(run))


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--api.api-token", r"api.api_token: a run keeps no secrets"),
        ("--trainer.vllm_api_key", r"trainer.vllm_api_key: a run keeps no secrets"),
        ("--vllm.api-key", r"vllm.api_key: a run keeps no secrets, .* set VLLM_API_KEY"),
        ("--vllm.hf_token", r"vllm.hf_token: a run keeps no secrets, .* set HF_TOKEN"),
        ("--teacher.api_key", r"teacher.api_key: a run keeps no secrets, .* set VLLM_API_KEY"),
    ],
)
@pytest.mark.parametrize("secret", ["0123456789abcdef0123", "12345678901234567890"])
@pytest.mark.usefixtures("no_processes")
def test_a_secret_that_is_typed_is_refused(flag: str, names: str, secret: str) -> None:
    teacher = ["--teacher.model", "org/big", "--trainer.distill-coef", "1"] if "teacher" in flag else []
    with pytest.raises(ConfigError, match=names):
        plan("arithmetic", *teacher, flag, secret)


@pytest.mark.parametrize("flags", ["--api-key KEY", "--max-model-len 256 --api_key=KEY", "--hf-token KEY"])
@pytest.mark.usefixtures("no_processes")
def test_a_secret_among_flags_of_the_vllm_that_the_trainer_starts_is_refused(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"(api.key|hf-token): a run keeps no secrets.*: set (VLLM_API_KEY|HF_TOKEN)"):
        plan("arithmetic", "--bridge.kind", "restart", f"--bridge.vllm_flags={flags}")


@pytest.mark.services
@pytest.mark.parametrize("flag", ["--env.rollout-server-token", "--env.openai.api_key"])
def test_a_secret_that_is_typed_for_an_environment_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"environments.gsm8k.*: a run keeps no secrets"):
        plan("arithmetic", f"{flag}=0123456789abcdef0123")


@pytest.mark.usefixtures("no_processes")
def test_who_calls_a_vllm_server_with_a_key_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "0123456789abcdef0123")
    made = plan("agent", "--env.command", "true", "--model", "org/small")
    assert made.environments["env"].resolved["openai"][0]["api_key_env"] == "VLLM_API_KEY"
    services = {service.name: service for service in made.services}
    assert services[AGENTS].environment["ATROPOS_AGENT_ENDPOINT_SERVER_KEY"] == "0123456789abcdef0123"
    taught = plan("arithmetic", "--teacher.model", "org/big", "--trainer.distill-coef", "1")
    assert taught.environments["env"].resolved["teacher"][0]["api_key_env"] == "VLLM_API_KEY"
    elsewhere = plan("arithmetic", "--env.openai.base_url", "http://other:9001/v1")
    assert not elsewhere.environments["env"].resolved["openai"][0]["api_key_env"]


@pytest.mark.usefixtures("no_processes")
def test_only_visible_gpus_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["4", "6", "7"])
    assert plan("gsm8k").site.placement.vllm == ("4", "6")
    assert plan("gsm8k").site.placement.trainer == ("7",)
    chosen = plan("gsm8k", "--layout.vllm", "7", "--layout.trainer", "4").site.placement
    assert (chosen.vllm, chosen.trainer) == (("7",), ("4",))
    with pytest.raises(ConfigError, match="there is no GPU 5; the visible GPUs are 4, 6, 7"):
        plan("gsm8k", "--layout.vllm", "5")
    with pytest.raises(
        ConfigError, match=r"leaves none for the trainer; .*Give it fewer \(--vllm.tensor-parallel-size"
    ):
        plan("gsm8k", "--vllm.tensor_parallel_size", "3")


@pytest.mark.usefixtures("no_processes")
def test_a_split_that_vllm_would_refuse_on_the_node_is_refused_by_the_plan() -> None:
    words = ["gsm8k", "Qwen/Qwen3-8B", "--gpus", "8x80", "--dry-run", "--vllm.tensor-parallel-size"]
    says = "vLLM's --tensor-parallel-size 3 does not divide the 32 attention heads of this model: give one of 1, 2, 4$"
    with pytest.raises(ConfigError, match=says):
        train.main([*words, "3"])
    assert train.main([*words, "2"]) == 0


@pytest.mark.usefixtures("no_processes")
def test_the_host_memory_that_is_named_takes_the_place_of_this_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """7B on one GPU of 80 GB keeps 122 GB of states in host memory."""
    argv = ["gsm8k", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "1x80", "--dry-run"]
    monkeypatch.setattr(gpus, "available_memory", lambda: 64 * 10**9)
    with pytest.raises(ConfigError, match=r"training Qwen/Qwen2\.5-7B-Instruct needs "):
        train.main([*argv, "--host-memory", "64"])
    capsys.readouterr()
    assert train.main([*argv, "--host-memory", "256"]) == 0
    assert " of 256.000 GB free" in capsys.readouterr().out
    assert train.main(argv) == 0, "another machine's memory is not this one's"
    assert " of 160.000 GB free" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpus", "1x80"], "moments"),  # vLLM's share is not taken yet when the trainer looks at its GPU
        (["--gpus", "1x80", "--trainer.offload", "none"], "none"),
        (["--gpus", "2x80"], "auto"),  # a GPU of its own
        (["--gpus", "1x80", "--bridge", "single_copy"], "auto"),  # checked once vLLM has told what it shares
    ],
)
def test_a_trainer_beside_vllm_is_told_what_offload_the_plan_has_chosen(
    words: list[str], told: str, no_processes: None
) -> None:
    made = plan("gsm8k", "Qwen/Qwen2.5-3B-Instruct", "--host-memory", "64", *words)
    assert yaml.safe_load(made.files["trainer.yaml"])["offload"] == told
    assert made.trainer.offload == told
    assert ("offload" in made.files["run.yaml"]) is ("--trainer.offload" in words)  # another machine decides again


def test_a_run_is_resumed_by_its_name_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    runs = ["--runs", str(tmp_path), "--dry-run"]
    with pytest.raises(ConfigError, match=r"mine has no run\.yaml: name a run, or its directory"):
        read_command_line(["--resume", "mine", *runs], {})
    (tmp_path / "mine/run.yaml").write_text("base: arithmetic.yaml\nsteps: 7\n")
    for name in ("mine", str(tmp_path / "mine")):
        asked = read_command_line(["--resume", name, *runs], {})
        assert (asked.resume, asked.run.steps) == (tmp_path / "mine", 7)
        assert asked.run.trainer["resume"] == "auto"
    with pytest.raises(NoSuchRun):
        read_command_line(["--resume", "other", *runs], {})


def test_every_launcher_takes_the_trainers_ranks(no_processes: None) -> None:
    assert ask_for("quickstart", "--trainer-ranks", "2").run.trainer["trainer_ranks"] == "2"
    assert plan("gsm8k", "--trainer-ranks", "2").trainer.trainer_ranks == 2
    assert plan("gsm8k", "--trainer.trainer-ranks", "2").trainer.trainer_ranks == 2
    assert plan("gsm8k", "--tp-size", "3").trainer.tp_size == 3
    assert plan("gsm8k", "--trainer.tp-size", "3").trainer.tp_size == 3


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--env.max_new_tokens 256",
            r"env.max_new_tokens 256 leaves no room for a prompt within vllm.max_model_len 256",
        ),
        ("--trainer.seq_len 24", r"env.max_new_tokens 24 leaves no room for a prompt within trainer.seq_len 24: give"),
        (
            "--env.max_new_tokens 300 --vllm.max_model_len 400",
            "env.max_new_tokens 300 leaves no .* trainer.seq_len 256",
        ),
    ],
)
def test_an_answer_leaves_room_for_its_prompt(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train.main(["arithmetic", *flags.split(), "--dry-run"])


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--vllm.max_modell_len 512",
            r"vllm.max_modell_len: the installed vLLM has no such flag; did you mean 'max_model_len'\?",
        ),
        ("--vllm.zzz.level 3", "vllm.zzz.level: the installed vLLM has no such flag"),
        ("--vllm.compilation_config.level 3 --vllm.max-num-seqs 8 --vllm.structured_outputs true", None),
    ],
)
def test_a_flag_that_vllm_lacks_is_refused_before_it_starts(flags: str, says: str | None) -> None:
    argv = ["arithmetic", *flags.split(), "--dry-run"]
    if says is None:
        assert train.main(argv) == 0
        return
    with pytest.raises(ConfigError, match=says):
        train.main(argv)


@pytest.mark.usefixtures("no_processes")
def test_without_vllm_no_flag_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atropos_launcher.plan.server_flags.installed_flags", frozenset)
    assert train.main(["arithmetic", "--vllm.max_modell_len", "512", "--dry-run"]) == 0


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ({}, True),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, False),
        ({"rope_parameters": {"rope_type": "default"}}, True),
        ({"max_position_embeddings": 8192}, False),
    ],
)
def test_a_server_is_not_to_serve_more_than_the_models_context(
    more: dict[str, object], is_refused: bool, tmp_path: Path
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"num_hidden_layers": 2} | more))
    argv = ["arithmetic", "--model", str(tmp_path), "--vllm.max_model_len", "4096", "--dry-run"]
    if not is_refused:
        assert train.main(argv) == 0
        return
    with pytest.raises(ConfigError, match=r"vllm\.max_model_len 4096 is above the 2048 tokens of context of "):
        train.main(argv)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("words", "fits"), [("5", False), ("12", False), ("128", False), ("16", True), ("64", True)])
def test_a_group_size_that_never_fills_a_batch_is_refused(words: str, fits: bool) -> None:
    argv = ["arithmetic", "--env.group_size", words, "--dry-run"]
    if fits:
        assert train.main(argv) == 0
        return
    with pytest.raises(ConfigError, match=f"env.group_size {words}: whole groups never fill a batch of 64 rollouts"):
        train.main(argv)


@pytest.mark.usefixtures("no_processes")
def test_questions_that_are_not_there_are_refused_before_anything_starts(tmp_path: Path) -> None:
    argv = ["gsm8k", "--env.dataset_path", str(tmp_path / "mine.jsonl"), "--dry-run"]
    with pytest.raises(
        ConfigError,
        match=r"environments.gsm8k: env.dataset_path: .*mine\.jsonl does not exist: correct the path, seen from /",
    ):
        train.main(argv)
    (tmp_path / "mine.jsonl").write_text("")
    assert train.main(argv) == 0


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("agent", 'there is no agent to start: give --env.command "python my_agent.py {task}"'),
        ("agent --env.command no-such-program", "there is no program 'no-such-program' to run"),
        ("agent --env.command true --env.score_command no-such-program", "correct --env.score_command"),
        ("agent --env.command true --env.tasks_path /nowhere.jsonl", "env.tasks_path: /nowhere.jsonl does not exist"),
        ("agent --env.command true", None),
        ("arithmetic --env.file letter_counting --env.words_path /nowhere", "env.words_path: /nowhere does not exist"),
        ("gsm8k --env.dataset_test_path /nowhere.csv", "env.dataset_test_path: /nowhere.csv does not exist"),
        ("verifiers --env.taskset /nowhere.py", "env.taskset: /nowhere.py does not exist"),
        ("verifiers --env.taskset of-an-owner/on-a-hub", None),
        ("arithmetic --env.chat_template /nowhere.jinja", "env.chat_template: /nowhere.jinja does not exist"),
    ],
)
@pytest.mark.parametrize("command", [train, evaluate])
def test_what_an_environment_lacks_is_told_before_vllm_starts(
    command: ModuleType, words: str, says: str | None, tmp_path: Path
) -> None:
    argv = [*words.split(), "--runs", str(tmp_path), "--dry-run"]
    if says is None:
        assert command.main(argv) == 0
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        command.main(argv)
    assert command.main([*argv, "--gpus", "2"]) == 0  # another machine's plan


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api.port", "abc"], "the command line: api: port: expected a port from 1 to 65535, got 'abc'"),
        (["--layout.vlm", "0"], "the command line: unknown key 'layout.vlm'; did you mean 'layout.vllm'"),
        (["--vllm.count", "2", "--bridge", "single_copy"], "the command line: bridge single_copy .* supports one vLLM"),
    ],
)
def test_a_run_file_is_not_blamed_for_a_flag(flags: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        read_command_line(["arithmetic", *flags, "--dry-run"])
    own = tmp_path / "mine.yaml"
    own.write_text("base: arithmetic.yaml\nlayout: {vlm: 0}\n")
    with pytest.raises(ConfigError, match=r"^mine\.yaml: "):
        read_command_line([str(own), *flags, "--dry-run"])
