"""Several vLLM servers in one run: what each is told, where each is, and what is refused before anything starts."""

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_launcher.commands import evaluate, train
from atropos_launcher.placement.ports import Ports, PortTaken
from atropos_launcher.plan import site
from atropos_launcher.plan.services import Plan
from atropos_launcher.run_file.run_file import Choice, merge, read_run, validated
from atropos_launcher.run_file.saved_settings import MASKED, without_secrets
from atropos_launcher.run_file.servers import (
    each_server,
    is_server,
    merged_servers,
    served_tokens,
    server_name,
    with_flag,
    with_ports,
)
from atropos_launcher.service import Service
from atroposlib.flags import ConfigError
from example_trainer.settings.bridges import LAUNCHED, MODES
from tests.unit.launcher.plans import ask_for, no_processes, on_gpus, plan

__all__ = ["no_processes"]

pytestmark = pytest.mark.usefixtures("no_processes")
MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
TWO = ("arithmetic", "--vllm.count", "2")


def servers_of(made: Plan) -> list[Service]:
    return [service for service in made.services if is_server(service.name)]


def flag(service: Service, name: str) -> str:
    """The value of a flag that a service is started with."""
    return service.command[service.command.index(name) + 1]


# --- what a run file says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vllm", "each"),
    [
        ({}, [{}]),
        ({"seed": 1}, [{"seed": 1}]),
        ({"seed": 1, "count": 2}, [{"seed": 1}, {"seed": 1}]),
        ({"port": 9101, "count": 3}, [{"port": 9101}, {}, {}]),
        ([{"port": 9101}, {}], [{"port": 9101}, {}]),
    ],
)
def test_a_mapping_a_count_or_a_list(vllm: Any, each: list[dict[str, Any]]) -> None:
    assert each_server(vllm) == each


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        ({"count": 0}, "vllm.count: expected 1 to 64 servers, got 0"),
        ({"count": True}, "vllm.count: expected 1 to 64 servers, got True"),
        ({"count": "two"}, "vllm.count: expected 1 to 64 servers, got 'two'"),
        ([], "vllm: expected 1 to 64 servers, but the list has 0"),
        ([{"count": 2}], "vllm.count: vllm is a list here, with one entry per server; add or remove entries instead"),
        (["a"], "vllm: expected keys and values of one server, or a list of servers, got ['a']"),
        (3, "vllm: expected keys and values of one server, or a list of servers, got 3"),
    ],
)
def test_what_are_no_servers_is_refused(vllm: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validated({"vllm": vllm, "environments": {"a": {"file": "a.py"}}}, "run.yaml")
    assert str(raised.value) == message


def test_a_list_takes_the_flags_below_and_a_mapping_changes_every_server() -> None:
    below = {"seed": 1, "port": 9001, "count": 3, "deep": {"a": 1}}
    listed = merged_servers(below, [{"deep": {"b": 2}}, {"seed": 2}])
    assert listed == [{"seed": 1, "deep": {"a": 1, "b": 2}}, {"seed": 2, "deep": {"a": 1}}]
    assert each_server(merged_servers(listed, {"seed": 3}))[1] == {"seed": 3, "deep": {"a": 1}}
    assert merged_servers(listed, [{"seed": 4}]) == [{"seed": 4}]
    assert merge({"vllm": [{}, {}]}, {"vllm": {"seed": 3}})["vllm"] == [{"seed": 3}, {"seed": 3}]


def test_a_run_file_lists_servers_over_its_base(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base: arithmetic.yaml\nvllm: [{}, {max_num_seqs: 8, port: 9100}]")
    run = validated(read_run(path, Choice("cpu")), "run.yaml")
    common = {"max_model_len": 256, "tensor_parallel_size": 1}
    assert run.servers == [common, common | {"max_num_seqs": 8, "port": 9100}]


def test_flags_change_one_server_or_all() -> None:
    assert with_flag({"a": 1}, 1, "b", 2) == {"a": 1, "b": 2}
    assert with_flag({"a": 1, "count": 2}, 2, "b", 2) == [{"a": 1}, {"a": 1, "b": 2}]
    with pytest.raises(ConfigError, match=r"--vllm\.3\.b: the vLLM servers of this run are 1 to 2"):
        with_flag({"count": 2}, 3, "b", 2)
    first, second = servers_of(
        plan(*TWO, *"--vllm.max_model_len 128 --vllm.2.max_num_seqs 8 --vllm.2.port=9107".split())
    )
    assert (flag(first, "--max-model-len"), flag(second, "--max-model-len")) == ("128", "128")
    assert (flag(first, "--max-num-seqs"), flag(second, "--max-num-seqs")) == ("64", "8")
    assert (flag(first, "--port"), flag(second, "--port")) == ("9001", "9107")


def test_the_ports_of_a_flag_are_one_each_or_the_first() -> None:
    assert with_ports({"count": 2}, (9101,)) == {"count": 2, "port": 9101}
    assert with_ports({"count": 2}, (9101, 9107)) == [{"port": 9101}, {"port": 9107}]
    with pytest.raises(ConfigError, match=r"--vllm-port 1,2,3 is 3 ports, but this run has 2 vLLM server"):
        with_ports([{}, {}], (1, 2, 3))
    assert plan(*TWO, "--vllm-port", "9101").site.vllm_ports == (9101, 9102)
    assert plan(*TWO, "--vllm-port", "9101,9107").site.vllm_ports == (9101, 9107)


def test_a_port_that_is_not_given_is_the_next_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Ports() as ports:
        port = taken.getsockname()[1]
        monkeypatch.setitem(site.PORTS, "vllm", port)
        first, second = site.choose_ports("vllm", [None, None], ports, dry_run=False)
        assert port < first < second
        with pytest.raises(PortTaken, match=f"--vllm-port {second} is taken"):
            site.choose_ports("vllm", [None, second], Ports(), dry_run=False)
    monkeypatch.setitem(site.PORTS, "vllm", 9001)
    assert site.choose_ports("vllm", [None, 9001, None], Ports(), dry_run=True) == (9002, 9001, 9003)


def test_two_servers_of_one_port_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.port: vllm-1 and vllm-2 both have 9005: give each its own port"):
        plan(*TWO, "--vllm.1.port", "9005", "--vllm.2.port", "9005")


# --- what the programs are told ---------------------------------------------------------------------------------------


def test_each_has_a_port_a_log_a_seed_and_a_health_address_of_its_own() -> None:
    made = plan(*TWO, "--seed", "5")
    first, second = servers_of(made)
    assert (first.name, second.name) == ("vllm-1", "vllm-2") == (server_name(0, 2), server_name(1, 2))
    assert [flag(each, "--port") for each in (first, second)] == ["9001", "9002"]
    assert [flag(each, "--seed") for each in (first, second)] == ["5", "6"]
    assert [each.health for each in (first, second)] == [f"http://127.0.0.1:{port}/health" for port in (9001, 9002)]
    assert {"vllm-1.yaml", "vllm-2.yaml"} <= made.files.keys()
    paths = [each.environment["VLLM_BRIDGE_CONFIG_PATH"] for each in (first, second)]
    assert paths == ["/run/vllm-1_bridge_config.json", "/run/vllm-2_bridge_config.json"]
    assert first.restarts == second.restarts == 3


def test_one_server_is_what_it_was() -> None:
    (only,) = servers_of(plan("arithmetic"))
    assert (only.name, only.restarts, only.cores) == ("vllm", 3, ())
    assert only.environment["VLLM_BRIDGE_CONFIG_PATH"] == "/run/vllm_bridge_config.json"
    assert servers_of(plan("arithmetic", "--vllm.count", "1"))[0] == only
    assert isinstance(yaml.safe_load(plan("arithmetic").files["env.yaml"])["openai"], list)


def test_a_server_is_started_again_where_the_trainer_can_give_it_the_policy() -> None:
    for bridge, restarts, returns_in_s in [("broadcast", 3, 1800), ("reload", 3, 1800), ("lora", 3, 1800)]:
        made = plan("arithmetic", "--bridge", bridge)
        assert (servers_of(made)[0].restarts, made.trainer.vllm_return_s) == (restarts, returns_in_s)
    single = plan("arithmetic", "--bridge", "single_copy")
    assert (servers_of(single)[0].restarts, single.trainer.vllm_return_s) == (0, 0)


def test_the_trainer_and_every_environment_get_all_of_them() -> None:
    made = plan("two_environments", "--vllm.count", "2", "--environments.letters.openai.timeout", "77")
    assert made.trainer.vllm_servers == [("127.0.0.1", 9001), ("127.0.0.1", 9002)]
    for name, environment in made.environments.items():
        told = environment.resolved["openai"]
        assert [each["base_url"] for each in told] == [f"http://127.0.0.1:{port}/v1" for port in (9001, 9002)]
        assert {each["server_type"] for each in told} == {"vllm"}
        assert ({each["timeout"] for each in told} == {77}) == (name == "letters")


def test_a_server_of_several_is_connected_to_as_the_only_one_is() -> None:
    (alone,) = plan("arithmetic").environments["env"].resolved["openai"]
    for each in plan(*TWO).environments["env"].resolved["openai"]:
        assert each | {"base_url": ""} == alone | {"base_url": ""}


def test_an_environment_with_a_server_of_its_own_keeps_it() -> None:
    made = plan(*TWO, "--env.openai.base_url", "http://elsewhere:9001/v1")
    assert [each["base_url"] for each in made.environments["env"].resolved["openai"]] == ["http://elsewhere:9001/v1"]
    assert [service.name for service in evaluate.evaluation_services(made)] == ["env"]
    assert [service.name for service in evaluate.evaluation_services(plan(*TWO))] == ["vllm-1", "vllm-2", "env"]


def test_the_kept_run_repeats_it(tmp_path: Path) -> None:
    for number, flags in enumerate(([], ["--vllm.2.max_num_seqs", "8"], ["--env.openai.timeout", "77"])):
        made = plan(*TWO, *flags)
        kept = tmp_path / f"{number}.yaml"
        kept.write_text(made.files["run.yaml"])
        assert plan(str(kept)).files == made.files


def test_a_key_of_a_server_is_no_part_of_a_kept_run() -> None:
    printed = f"openai:\n- {{api_key: '{MASKED}'}}\n- {{api_key: '{MASKED}', timeout: 3}}\n"
    assert yaml.safe_load(without_secrets(printed, {"openai": [{}, {}]}, "e")) == {"openai": [{}, {"timeout": 3}]}
    with pytest.raises(ConfigError, match="a run keeps no secrets; give it by its environment variable"):
        without_secrets(printed, {"openai": [{}, {"api_key": "mine"}]}, "e")


# --- which bridges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAUNCHED)
def test_a_bridge_that_feeds_one_is_refused_by_its_name(kind: str) -> None:
    if MODES[kind].feeds_several:
        assert len(servers_of(plan(*TWO, "--bridge", kind))) == 2
        return
    with pytest.raises(ConfigError) as raised:
        plan(*TWO, "--bridge", kind)
    said = str(raised.value)
    assert f"bridge {MODES[kind].shown()} supports one vLLM server, but `vllm` has 2" in said
    assert said.endswith("keep one, or choose bridge broadcast")


@pytest.mark.parametrize("name", ["vllm", "vllm-2", "api", "trainer", "launcher", "a b"])
def test_an_environment_has_no_services_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not a valid environment name"):
        validated({"environments": {name: {"file": "a.py"}}}, "run.yaml")


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpus_of(made: Plan) -> list[str]:
    """Of each server, then of the trainer."""
    services = [*servers_of(made), *(service for service in made.services if service.name == "trainer")]
    return [service.environment["CUDA_VISIBLE_DEVICES"] for service in services]


@pytest.mark.parametrize(
    ("gpus", "words", "placed"),
    [
        (3, "", ["0", "1", "2"]),
        (8, "", ["0,1", "2,3", "4,5,6,7"]),
        (8, "--vllm.tensor_parallel_size 1", ["0", "1", "2,3,4,5,6,7"]),
        (8, "--vllm.2.tensor_parallel_size 4", ["0", "1,2,3,4", "5,6,7"]),
        (4, "--layout.vllm 3,1", ["3", "1", "0,2"]),
        (5, "--layout.vllm [[0,1],[2]]", ["0,1", "2", "3,4"]),
        (4, "--layout.trainer 0", ["1", "2", "0"]),
        (2, "--layout.vllm 0,1 --layout.trainer 1", ["0", "1", "1"]),
    ],
)
def test_each_has_gpus_of_its_own(gpus: int, words: str, placed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, [str(index) for index in range(gpus)])
    assert gpus_of(plan("gsm8k", "--vllm.count", "2", *words.split())) == placed


def test_a_server_that_shares_a_gpu_with_the_trainer_takes_less_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0", "1"])
    first, second = servers_of(plan("gsm8k", "--vllm.count", "2", "--layout.vllm", "0,1", "--layout.trainer", "1"))
    assert "--gpu-memory-utilization" not in first.command
    assert flag(second, "--gpu-memory-utilization") == "0.44"


@pytest.mark.parametrize(
    ("gpus", "words", "message"),
    [
        (2, "", "2 vLLM servers and a trainer need 3 GPUs, but the visible ones are 0, 1: lower the number of servers"),
        (4, "--layout.vllm [[0,1],[1]]", "layout.vllm: the servers 1 and 2 both have GPU 1"),
        (4, "--layout.vllm 0,1,2", r"layout.vllm: 3 GPUs \(0, 1, 2\) are not 1 \+ 1"),
        (4, "--layout.vllm [[0],[1],[2]]", "layout.vllm: 3 lists of GPUs, but this run has 2 vLLM server"),
        (4, "--layout.vllm [[0],[1]] --vllm.2.tensor_parallel_size 2", "vllm.2.tensor_parallel_size 2 takes exactly 2"),
        (
            3,
            "--vllm.tensor_parallel_size 2",
            "2 vLLM servers and a trainer need 5 GPUs, but the visible ones are 0, 1, 2",
        ),
        (4, "--layout.vllm 0,1,2,3", "layout: vLLM takes 0, 1, 2, 3, which leaves none for the trainer"),
    ],
)
def test_gpus_that_do_not_go_round_are_refused(
    gpus: int, words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, [str(index) for index in range(gpus)])
    with pytest.raises(ConfigError, match=message):
        plan("gsm8k", "--vllm.count", "2", *words.split())


def test_the_memory_plan_has_every_server() -> None:
    words = ["gsm8k", MODEL, "--vllm.count", "2", "--gpus", "8"]
    assert "# Each GPU of vllm-1, vllm-2 (0, 1, 2, 3)\n" in train.described(plan(*words), ask_for(*words))
    one, two = (
        train.described(plan("gsm8k", MODEL, "--vllm.count", count), ask_for("gsm8k", MODEL, "--vllm.count", count))
        for count in ("1", "2")
    )
    assert "#   vLLM: KV cache                                     1.074 GB" in one
    assert "#   2 x vLLM: KV cache                                 2.147 GB" in two


def test_a_server_too_large_for_its_gpu_is_named() -> None:
    words = ["gsm8k", "Qwen/Qwen2.5-14B-Instruct", "--gpus", "3x24", "--vllm.count", "2"]
    with pytest.raises(ConfigError, match=r"vllm-1 needs .* on each of 1 GPU"):
        train.expect_fit(plan(*words), ask_for(*words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vllm.port abc", "vllm.port: expected a port from 1 to 65535, got 'abc'"),
        ("--vllm.port 70000", "vllm.port: expected a port"),
        (
            "--vllm.tensor-parallel-size two",
            "vllm.tensor_parallel_size: expected a number of GPUs, at least 1, got 'two'",
        ),
        (
            "--vllm.max-model-len long",
            "vllm.max_model_len: expected a number of tokens, as 4096, 4k or 4K, or auto, got",
        ),
        (
            "--vllm.gpu-memory-utilization 90",
            "vllm.gpu_memory_utilization: expected a share of a GPU's memory, above 0",
        ),
        (f"--vllm.max-model-len {'9' * 5000}", "vllm.max_model_len: expected a number of tokens, as 4096"),
        (f"--vllm.max-num-seqs {'9' * 5000}", "vllm.max_num_seqs: expected a number of sequences, at least 1"),
        ("--teacher.model M --teacher.max-model-len long", "teacher.max_model_len: expected a number of tokens"),
    ],
)
def test_a_value_by_which_the_run_is_planned_is_checked(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan("arithmetic", *words.split())


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("auto", None), (-1, None), ("2k", 2000), ("1K", 1024), ("0.5K", 512), (300, 300), (None, None)],
)
def test_the_length_of_a_servers_context_is_read_as_vllm_reads_it(given: object, tokens: int | None) -> None:
    (flags,) = each_server({"max_model_len": given})
    assert served_tokens(flags) == tokens
    assert flags["max_model_len"] == (tokens or (None if given is None else "auto"))


def test_a_context_that_vllm_chooses_is_planned_as_the_trainers() -> None:
    words = ["gsm8k", MODEL, "--gpus", "2x80", "--vllm.max-model-len"]
    (server,) = (service for service in plan(*words, "auto").services if service.name == "vllm")
    assert "--max-model-len auto" in " ".join(server.command)
    train.expect_fit(plan(*words, "auto"), ask_for(*words, "auto"))


def test_a_cache_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "")
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE: expected a whole number of GiB, got ''"):
        train.cache_on_cpu(plan("arithmetic"))
