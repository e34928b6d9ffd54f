import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from atroposlib.config import config_yaml
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ServerBaseline
from atroposlib.envs.commands.cli import EnvTree, _run_until_stopped, build, load_tree, main, run
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.envs.fakes import CountingEnv


class LooseConfig(BaseEnvConfig):
    """Defaults that do not satisfy their own types, as environments out there have them."""

    dataset_name: str = None  # type: ignore[assignment]
    names: list[str] = Field(default_factory=list)


class LooseEnv(CountingEnv):
    env_config_cls = LooseConfig
    servers: Any = APIServerConfig(base_url="http://one/v1", server_type="vllm")

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        return LooseConfig(group_size=6, steps_per_eval=7), cls.servers


class SeveralServers(LooseEnv):
    servers = (APIServerConfig(base_url="http://one/v1"), APIServerConfig(base_url="http://two/v1"))


class NoAddress(LooseEnv):
    servers = ServerBaseline(model_name="m")


def load(*arguments: str, env: type[LooseEnv] = LooseEnv, command: str = "serve") -> EnvTree:
    return load_tree(env, command, list(arguments), "env.py")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, env: type[LooseEnv] = LooseEnv) -> str:
    with pytest.raises(SystemExit) as caught:
        load(*arguments, env=env)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_flags_beat_yaml_beats_config_init(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("env: {group_size: 3, total_steps: 9}\nopenai: {base_url: http://yaml/v1}\nslurm: false\n")
    tree = load("--config", str(file), "--env.group_size", "2")
    assert (tree.env.group_size, tree.env.total_steps, tree.env.steps_per_eval) == (2, 9, 7)
    assert type(tree.env) is LooseConfig
    assert tree.env.dataset_name is None
    assert [type(server) for server in tree.openai] == [APIServerConfig]
    assert (tree.openai[0].base_url, tree.openai[0].server_type) == ("http://yaml/v1", "vllm")


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--env.steps_per_eval", "-1"], "steps_per_eval", -1),
        (["--env.total_steps=-1"], "total_steps", -1),
        (["--env.include_messages"], "include_messages", True),
        (["--env.use_wandb", "false"], "use_wandb", False),
        (["--env.no-use-wandb"], "use_wandb", False),
        (["--env.min_batch_allocation", "None"], "min_batch_allocation", None),
        (["--env.names", "a,b"], "names", ["a", "b"]),
        (
            ["--env.eval_handling", "NONE"],
            "eval_handling",
            BaseEnvConfig.model_fields["eval_handling"].annotation("NONE"),  # type: ignore
        ),
    ],
)
def test_flag_grammar(arguments: list[str], field: str, value: Any) -> None:
    assert getattr(load(*arguments).env, field) == value


def test_single_server_takes_every_flag() -> None:
    tree = load("--openai.base_url", "http://flag/v1", "--openai.model_name", "m", "--openai.api_key", "secret")
    assert (tree.openai[0].base_url, tree.openai[0].model_name, tree.openai[0].api_key) == (
        "http://flag/v1",
        "m",
        "secret",
    )
    assert tree.openai[0].server_type == "vllm"


def test_flags_give_an_environment_without_address_one_server() -> None:
    tree = load("--openai.base_url", "http://flag/v1", env=NoAddress)
    assert (tree.openai[0].base_url, tree.openai[0].model_name) == ("http://flag/v1", "m")
    assert type(load(env=NoAddress).openai) is ServerBaseline


def test_several_servers_come_from_config_init_or_yaml(tmp_path: Path) -> None:
    assert [server.base_url for server in load(env=SeveralServers).openai] == ["http://one/v1", "http://two/v1"]
    file = tmp_path / "c.yaml"
    file.write_text("openai: [{base_url: http://a/v1}, {base_url: http://b/v1, model_name: m}]\n")
    servers = load("--config", str(file)).openai
    assert [(server.base_url, server.model_name) for server in servers] == [
        ("http://a/v1", "default"),
        ("http://b/v1", "m"),
    ]


def test_constructor_may_name_its_arguments_as_it_likes(tmp_path: Path) -> None:
    class OtherNames(LooseEnv):
        def __init__(self, settings: Any, servers_: Any, slurm_job_id: Any = None, test: bool = False) -> None:
            super().__init__(settings, servers_, slurm_job_id, test)

    tokenizer = str(save_tiny_tokenizer(tmp_path / "t"))
    assert build(OtherNames, load("--env.tokenizer_name", tokenizer, env=OtherNames)).config.tokenizer_name == tokenizer


def test_flags_of_the_manager_reach_it(tmp_path: Path) -> None:
    flags = [
        "--proxy_url",
        "http://proxy",
        "--max_n_completions",
        "3",
        "--env.tokenizer_name",
        str(save_tiny_tokenizer(tmp_path / "t")),
    ]
    server = build(LooseEnv, load(*flags)).server
    assert (server.proxy_url, server.max_n_completions) == ("http://proxy", 3)


def test_server_flags_with_several_servers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--openai.base_url", "http://x/v1", env=SeveralServers)
    assert "--openai.* sets one inference server, but 2 are configured; list them under `openai:`" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env.grup_size", "2"], "unknown flag --env.grup_size; did you mean 'env.group_size'?"),
        (["--env.group_size", "none"], "(got 'none')"),
        (["--openai.bas_url", "x"], "did you mean 'openai.base_url'?"),
        (["--env.reasoning_effort", "huge"], "(got 'huge')"),
    ],
)
def test_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [("env: {grup_size: 2}", "env.grup_size"), ("openai: {bas_url: x}", "openai.bas_url"), ("enf: {}", "'enf'")],
)
def test_unknown_yaml_key_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "c.yaml").write_text(content)
    assert f"unknown key '{said.strip(chr(39))}'" in refused(capsys, "--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("group_size: 3", "the key 'group_size' belongs under env: in the --config file, not at the top"),
        ("api_key: secret", "the key 'api_key' belongs under openai: in the --config file, not at the top"),
        ("env: {slurm: true}", "the key 'slurm' belongs at the top in the --config file, not under env:"),
        (
            "openai: [{total_steps: 3}]",
            "the key 'total_steps' belongs under env: in the --config file, not under openai:",
        ),
    ],
)
def test_yaml_key_at_the_wrong_level_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "c.yaml").write_text(content)
    line = refused(capsys, "--config", str(tmp_path / "c.yaml"))
    assert said in line
    assert "secret" not in line


def test_foreign_yaml_keys_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "env: {quorum: 1, group_size: 3}\nopenai: [{base_url: http://a/v1, weight: 1.0}]\ntinker: {x: 1}\n"
    )
    tree = load("--config", str(tmp_path / "c.yaml"))
    assert tree.env.group_size == 3
    assert tree.openai[0].base_url == "http://a/v1"
    assert [record.getMessage() for record in caplog.records] == [
        "Ignoring the unknown key 'tinker' at the top of the --config file",
        "Ignoring the unknown key 'quorum' under env: of the --config file",
        "Ignoring the unknown key 'weight' under openai: of the --config file",
    ]


def test_unknown_constructor_arguments_are_ignored() -> None:
    assert BaseEnvConfig(group_name="g", run_name="r", group_size=2).group_size == 2


def test_api_keys_are_never_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(LooseEnv, ["serve", "--dry-run", "--openai.api_key", "topsecret"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "api_key" in out
    assert "topsecret" not in out
    assert "topsecret" not in config_yaml(load("--openai.api_key", "topsecret"))


def test_process_changes_defaults_below_flags() -> None:
    assert load(command="process").env.data_path_to_save_groups == "data/counting.jsonl"
    tree = load("--env.include_messages", "false", "--env.data_path_to_save_groups", "x.jsonl", command="process")
    assert (tree.env.include_messages, tree.env.data_path_to_save_groups, tree.env.ensure_scores_are_not_same) == (
        False,
        "x.jsonl",
        False,
    )
    assert tree.env.use_wandb is True  # as configured: `process` does not turn it on


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "no command; choose one of: serve, process, evaluate"), (["serv"], "unknown command 'serv'")],
)
def test_command_is_named_when_missing_or_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(CountingEnv, arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


async def test_tokenizer_that_cannot_be_loaded_is_one_line_and_exit_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = load("--openai.model_name", "m", "--env.tokenizer_name", str(tmp_path / "nowhere"))
    assert await run(LooseEnv, "evaluate", tree) == 1
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].exc_info is None
    assert "set tokenizer_name" in errors[0].message


async def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = load("--openai.model_name", "m", "--env.tokenizer_name", str(tmp_path))
    assert await run(LooseEnv, "evaluate", tree) == 1
    assert f"no tokenizer can be made of '{tmp_path}'" in caplog.text
    assert "name another (--env.tokenizer_name" in caplog.text


async def test_a_token_that_no_header_carries_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    flags = ["--openai.model_name", "m", "--env.tokenizer_name", tokenizer, "--env.rollout_server_token", "ü"]
    assert await run(LooseEnv, "serve", load(*flags)) == 1
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "a token has printable ASCII characters and no space" in error.message


def test_an_environment_that_ends_its_own_process_has_not_done_what_was_asked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked() -> int:
        sys.exit(0)

    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert _run_until_stopped(asked) == 1
    assert "The environment ended its own process (SystemExit: 0 at " in caplog.text


@pytest.mark.services
def test_a_fork_of_an_environment_ends_by_its_signal_at_once() -> None:
    program = """if True:
        import multiprocessing, time
        from atroposlib.envs.commands.cli import _run_until_stopped

        async def asked():
            for _ in range(100):  # some of the signals come before the fork's Python is ready for one
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
                child.start()
                child.terminate()
                child.join()
            return -child.exitcode

        raise SystemExit(_run_until_stopped(asked))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (signal.SIGTERM, "")


def test_documented_defaults_hold() -> None:
    config = BaseEnvConfig()
    assert config.model_dump(mode="json") | {
        "group_size": 4,
        "max_num_workers": -1,
        "max_eval_workers": 16,
        "max_num_workers_per_node": 8,
        "steps_per_eval": 100,
        "max_token_length": 2048,
        "eval_handling": "STOP_TRAIN",
        "eval_limit_ratio": 0.5,
        "inference_weight": 1.0,
        "batch_size": -1,
        "max_batches_offpolicy": 3,
        "tokenizer_name": "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        "use_wandb": True,
        "rollout_server_url": "http://localhost:8000",
        "total_steps": 1000,
        "wandb_name": None,
        "num_rollouts_to_keep": 32,
        "num_rollouts_per_group_for_logging": 1,
        "ensure_scores_are_not_same": True,
        "data_path_to_save_groups": None,
        "data_dir_to_save_evals": None,
        "min_items_sent_before_logging": 2,
        "include_messages": False,
        "min_batch_allocation": None,
        "worker_timeout": 600.0,
        "thinking_mode": False,
        "reasoning_effort": None,
        "max_reasoning_tokens": None,
        "custom_thinking_prompt": None,
    } == config.model_dump(mode="json")


def test_reasoning_is_enabled_by_its_details() -> None:
    def reasoning(**fields: Any) -> ReasoningConfig:
        return ReasoningConfig.from_env_config(BaseEnvConfig(**fields))

    assert not reasoning().enabled
    assert reasoning(thinking_mode=True).enabled
    assert reasoning(reasoning_effort="high").effort == "high"
