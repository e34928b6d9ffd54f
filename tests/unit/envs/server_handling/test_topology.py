"""Which servers a configuration stands for."""

import pytest

from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline, ServerEnvironment
from atroposlib.envs.server_handling.topology import expand_nodelist, server_configs, slurm_urls


def environment(**variables: object) -> ServerEnvironment:
    return ServerEnvironment.model_validate(variables)


def test_a_single_config_is_one_server_and_keeps_its_address() -> None:
    config = APIServerConfig(base_url="http://gpu:9001/v1", server_type="vllm")
    assert server_configs(config, slurm=False, environment=environment(SLURM_JOB_NODELIST="node1")) == [config]


def test_a_list_is_one_server_each() -> None:
    configs = [APIServerConfig(base_url=f"http://gpu:{port}/v1") for port in (1, 2)]
    assert server_configs(configs, slurm=True, environment=environment()) == configs


def test_a_baseline_is_the_four_local_ports_with_all_its_settings() -> None:
    found = server_configs(
        ServerBaseline(server_type="vllm", timeout=7, model_name="m"), slurm=False, environment=environment()
    )
    assert [config.base_url for config in found] == [f"http://localhost:{port}/v1" for port in (9004, 9005, 9006, 9007)]
    assert {(config.server_type, config.timeout, config.model_name) for config in found} == {("vllm", 7, "m")}


def test_slurm_uses_the_nodes_after_the_training_ones() -> None:
    urls = slurm_urls(environment(SLURM_JOB_NODELIST="n[1-3]", NUM_TRAINING_NODES="2", INFER_TP="4"))
    assert urls == ["http://n3:9000/v1", "http://n3:9001/v1"]


def test_slurm_needs_neither_count_nor_tensor_parallel_size() -> None:
    assert slurm_urls(environment(SLURM_JOB_NODELIST="n1")) == [f"http://n1:{port}/v1" for port in range(9000, 9008)]


def test_slurm_keeps_every_setting_of_the_config() -> None:
    config = APIServerConfig(server_type="vllm", n_kwarg_is_ignored=True, health_check=False, api_key="k")
    found = server_configs(config, slurm=True, environment=environment(SLURM_JOB_NODELIST="n1", INFER_TP="8"))
    assert found == [config.model_copy(update={"base_url": "http://n1:9000/v1"})]


def test_slurm_without_a_job_says_so() -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST is not set"):
        server_configs(ServerBaseline(), slurm=True, environment=environment())


def test_no_node_left_for_inference_says_so() -> None:
    with pytest.raises(ValueError, match="NUM_TRAINING_NODES=1 leaves none of the 1 nodes"):
        slurm_urls(environment(SLURM_JOB_NODELIST="n1", NUM_TRAINING_NODES="1"))


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        server_configs([], slurm=False, environment=environment())


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("gpu[098-101].local", ["gpu098.local", "gpu099.local", "gpu100.local", "gpu101.local"]),
        ("r[1-2]n[1-2]", ["r1n1", "r2n1", "r1n2", "r2n2"]),
    ],
)
def test_node_lists_expand(nodelist: str, nodes: list[str]) -> None:
    assert sorted(expand_nodelist(nodelist)) == sorted(nodes)
