"""What is said of a Ray cluster before it is joined, and the plan of a run on it."""

import sys
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from types import SimpleNamespace

import pytest

from atropos_launcher.commands import train
from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.machines import LOOPBACK, Machine, Machines
from atropos_launcher.placement.ray_cluster import Facts, Nodes
from atropos_launcher.plan.services import machine_lines, reservations
from atroposlib.extras import MissingExtra
from atroposlib.flags import ConfigError
from tests.serving import Reply, ThreadedServer, free_port
from tests.unit.launcher.plans import ask_for, no_processes, on_gpus, plan

__all__ = ["no_processes"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--ray", "10.0.0.1"], "--ray 10.0.0.1 is no address: give HOST:PORT"),
        (["--ray", "auto", "--ray-nodes", "4+"], "--ray-nodes: String should match pattern"),
        (["--hosts", "h.txt"], "--hosts was removed. Ray starts what runs on other machines: run `ray start` on each"),
        (["--remote-command=srun", "--ray", "auto"], "--remote-command was removed. .* give --ray auto"),
        (["--host-timeout", "9"], "--host-timeout was removed. Ray"),
        (["--ray-nodes", "2"], "--ray-nodes 2 is only for --ray"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ask_for("gsm8k_broadcast", *words)


def test_a_cluster_that_nobody_answers_for_is_named_with_the_remedy() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    with pytest.raises(ConfigError, match=rf"--ray {address} cannot be reached .*ray start --head"):
        ray_cluster.expect_reachable(address)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.extras.find_spec", lambda module: None)
    with pytest.raises(MissingExtra, match=r"--ray needs ray, which is not installed; pip install .*\[ray\]"):
        ray_cluster.join("auto")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ray": "2.1.0"}, "node 10.0.0.2 has Ray 2.1.0, and this one"),
        ({"python": "3.9.1"}, "node 10.0.0.2 has Python 3.9.1, and this one"),
        ({"has_python": False}, f"node 10.0.0.2 lacks this Python, {sys.executable}"),
        ({"has_checkout": False}, "node 10.0.0.2 lacks Atropos in"),
        ({"has_model": False}, "node 10.0.0.2 lacks the model /m: copy it there"),
    ],
)
def test_a_node_that_differs_is_named_with_what_it_has(changed: dict[str, object], why: str) -> None:
    here = {"python": python_version(), "ray": version("ray"), "has_python": True, "has_checkout": True}
    ray_cluster.expect_suits("10.0.0.2", Facts(**{**here, "has_model": True}), "/m")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=why):
        ray_cluster.expect_suits("10.0.0.2", Facts(**{**here, "has_model": True, **changed}), "/m")  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_processes")
def test_a_dry_run_shows_what_ray_starts_and_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0", "1", "2"])
    found = plan("gsm8k_broadcast", "--ray", "local", "--vllm.count", "2")
    assert reservations(found) == [{"CPU": 3, "GPU": 3}]
    (line,) = machine_lines(found)
    assert line.startswith(f"Machine {LOOPBACK}: vllm-1 on port 9001, vllm-2 on port 9002, trainer rank 0 of 1")
    assert line.endswith("Ray reserves 3 CPUs and 3 GPUs")
    by_ray = [service.name for service in found.services if "--ray" in service.command]
    assert by_ray == ["vllm-1", "vllm-2", "trainer"]


@pytest.mark.usefixtures("no_processes")
def test_a_run_file_names_the_cluster_and_nodes_are_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(address: str, nodes: Nodes, silence_s: float) -> Machines:
        asked.append((address, nodes, silence_s))
        return Machines((Machine("10.0.0.1"), Machine("10.0.0.2")), silence_s=silence_s, ray="10.0.0.1:6379", group="g")

    monkeypatch.setattr(ray_cluster, "connect", connect)
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-the-user")
    found = plan("gsm8k_broadcast", "--layout.ray", "10.0.0.1:6379", "--ray-nodes", "2")
    assert asked == [("10.0.0.1:6379", Nodes(2), 30.0)]
    hosts = {service.name: service.host for service in found.services}
    assert (hosts["vllm-1"], hosts["vllm-2"], hosts["trainer"], hosts["trainer-2"]) == ("", "10.0.0.2", "", "10.0.0.2")
    commands = {service.name: service.command for service in found.services}
    groups = {name: words[words.index("--group") + 1] for name, words in commands.items() if "--group" in words}
    assert groups == {"vllm-1": "g-0", "vllm-2": "g-1", "trainer": "g-0", "trainer-2": "g-1"}
    words = train.flags_of_machines(ask_for("gsm8k_broadcast", "--ray", "10.0.0.1:6379").given)
    assert words == ["--ray", "10.0.0.1:6379"]


def test_a_run_file_that_still_has_hosts_says_what_took_their_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: gsm8k_broadcast\nhosts: hosts.txt\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: 'hosts' was removed\. Ray starts what runs .* give --ray auto"):
        ask_for(str(tmp_path / "mine.yaml"))
    with pytest.raises(ConfigError, match=r"'layout\.hosts' was removed\. Ray"):
        ask_for("gsm8k_broadcast", "--layout.hosts", "hosts.txt")


@pytest.mark.parametrize(("kind", "has"), [("CPU", 2), ("GPU", 0)])
def test_a_node_with_less_than_the_run_reserves_is_named_with_both_numbers(kind: str, has: int) -> None:
    ray_cluster.expect_enough("10.0.0.2", {"CPU": 4.0, "GPU": 8.0}, {"CPU": 4, "GPU": 8})
    why = rf"node 10.0.0.2 has {has} {kind}s, and this run needs 3 there: start its Ray with --num-{kind.lower()}s"
    with pytest.raises(ConfigError, match=why):
        ray_cluster.expect_enough("10.0.0.2", {"CPU": 2.0}, {kind: 3})


def test_a_node_that_has_gone_is_not_taken_for_the_one_that_has_started_again_at_its_address() -> None:
    with ThreadedServer(lambda asked: Reply()) as raylet:
        again = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.port, "Alive": True}
        gone = {**again, "NodeManagerPort": free_port()}
        listed = SimpleNamespace(nodes=lambda: [gone, again, {**again, "Alive": False}])
        assert ray_cluster.live_nodes(listed) == [again]
