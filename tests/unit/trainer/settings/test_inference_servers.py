"""Which servers a trainer feeds, from flags, hosts file and SLURM; errors name file, line and remedy."""

from pathlib import Path

import pytest

from atroposlib.config import config_yaml, resolve_config
from atroposlib.flags import ConfigError
from example_trainer.bridges import BridgeError, make_bridge
from example_trainer.settings.bridges import MODES, Mode
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.servers import Address

BROADCAST = ["--model", "m", "--weight-bridge-mode", "shared_vllm", "--use-shared-memory"]


def servers(*flags: str, **env: str) -> list[Address]:
    return resolve_config(TrainerConfig, [*BROADCAST, *flags], prog="grpo", env=env)[0].vllm_servers


def hosts(folder: Path, text: str) -> str:
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


def test_each_port_is_a_server_on_the_host() -> None:
    assert servers() == [("localhost", 9001)]
    assert servers("--vllm-port", "9001,9002", "--vllm-host", "gpu01") == [("gpu01", 9001), ("gpu01", 9002)]
    assert TrainerConfig.model_validate({"model_name": "m", "vllm_port": 7}).vllm_servers == [("localhost", 7)]
    assert TrainerConfig.model_validate({"model_name": "m", "vllm_port": "7,8"}).vllm_servers == [
        ("localhost", 7),
        ("localhost", 8),
    ]


def test_servers_on_several_machines_are_a_list_of_hosts() -> None:
    assert servers("--vllm-host", "127.0.0.1:9003,gpu02") == [("127.0.0.1", 9003), ("gpu02", 9001)]
    with pytest.raises(ConfigError, match="--vllm-host: 'gpu 2' is not host"):
        _ = servers("--vllm-host", "gpu01,gpu 2")


def test_the_ports_survive_a_written_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(TrainerConfig.model_validate({"model_name": "m", "vllm_port": (9001, 9002)})))
    assert resolve_config(TrainerConfig, ["--config", str(path)], prog="grpo", env={})[0].vllm_ports == (9001, 9002)
    path.write_text("model_name: m\nvllm_port: 9003\n")
    assert resolve_config(TrainerConfig, ["--config", str(path)], prog="grpo", env={})[0].vllm_ports == (9003,)


def test_a_hosts_file_names_the_servers(tmp_path: Path) -> None:
    path = hosts(tmp_path, "# two machines\ngpu01\n\n10.0.0.7:9005  # the other\n")
    found = servers("--hosts-file", path, "--vllm-port", "9001,9002", NUM_INFERENCE_NODES="2")
    assert found == [("gpu01", 9001), ("gpu01", 9002), ("10.0.0.7", 9005)]


def test_a_slurm_job_gives_its_last_nodes() -> None:
    assert servers(NUM_INFERENCE_NODES="2", SLURM_JOB_NODELIST="gpu[01-04]") == [("gpu03", 9001), ("gpu04", 9001)]


@pytest.mark.parametrize(
    ("text", "nodes", "says"),
    [
        ("gpu01\ngpu01:70000\n", "1", "hosts:2: port 70000 is not between 1 and 65535"),
        ("gpu01\ngpu 02\n", "2", "hosts:2: 'gpu 02' is not host[:port]; write e.g."),
        ("gpu01\ngpu01:9001\n", "1", "names gpu01:9001 twice"),
        ("gpu01\ngpu02\n", "3", "names 2 host(s), but NUM_INFERENCE_NODES is 3: make them agree"),
        ("# nobody\n", "1", "contains no host: write one host[:port] per line"),
        ("gpu01\n", "0", "is given, but NUM_INFERENCE_NODES is 0: set it to the number of hosts in the file"),
    ],
)
def test_a_wrong_hosts_file_is_one_line_with_the_remedy(tmp_path: Path, text: str, nodes: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        servers("--hosts-file", hosts(tmp_path, text), NUM_INFERENCE_NODES=nodes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--vllm-port", "9001,9001"], "--vllm-port names localhost:9001 twice"),
        (["--vllm-port", "9001,70000"], "less than or equal to 65535 (got 70000)"),
        (["--vllm-port", "9001,x"], "(got 'x')"),
        (["--bridge-timeout-s", "3601"], "less than or equal to 3600 (got '3601')"),  # which no server accepts
        (["--num-inference-nodes", "2"], "NUM_INFERENCE_NODES=2 needs --hosts-file FILE"),
        (["--num-inference-nodes", "2", "--slurm-job-nodelist", "gpu1"], "the SLURM job has 1 node(s)"),
        (["--num-inference-nodes", "1", "--hosts-file", "/no/such"], "--hosts-file /no/such cannot be read: "),
    ],
)
def test_wrong_servers_are_refused_before_anything_is_loaded(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        servers(*flags)
    assert says in str(caught.value)


@pytest.mark.parametrize("mode", [mode for mode in MODES.values() if not mode.feeds_several])
def test_a_bridge_that_feeds_one_server_refuses_two(mode: type[Mode]) -> None:
    config = TrainerConfig.model_validate({"model_name": "m", "bridge": mode(), "vllm_port": "9001,9002"})
    with pytest.raises(
        BridgeError, match=r"supports one vLLM server \(--vllm-host\), not localhost:9001, localhost:9002"
    ):
        make_bridge(config)
