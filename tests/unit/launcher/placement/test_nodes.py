"""The plan of a run on several Ray nodes, without a cluster."""

from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.machines import Machine, Machines
from atropos_launcher.placement.ray_cluster import Nodes, planned
from atropos_launcher.plan.services import Plan, machine_lines, reservations
from atropos_launcher.service import Service
from atroposlib.flags import ConfigError
from tests.unit.launcher.plans import MODEL, ask_for, no_processes, on_gpus, plan

__all__ = ["no_processes"]

TWO = (Machine("10.0.0.1"), Machine("10.0.0.2"))
APART = (Machine("a", serves=False), Machine("b", serves=False), Machine("c", trains=False))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-the-user")


def on_cluster(monkeypatch: pytest.MonkeyPatch, nodes: tuple[Machine, ...]) -> None:
    """`--ray auto` finds these."""

    def connect(address: str, wanted: Nodes, silence_s: float) -> Machines:
        return Machines(wanted.taken(nodes), silence_s, ray="10.0.0.1:6379", group="g")

    monkeypatch.setattr(ray_cluster, "connect", connect)


def on_two(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> Plan:
    on_cluster(monkeypatch, TWO)
    return plan("arithmetic", "--ray", "auto", *words, run_dir=folder / "run")


def by_name(made: Plan) -> dict[str, Service]:
    return {service.name: service for service in made.services}


def test_nodes_have_both_roles_or_the_first_ones_train_and_the_others_serve() -> None:
    both = planned(Nodes.of("2"), 30)
    assert both.all == (Machine("node-1"), Machine("node-2"))
    assert (both.training, both.serving, both.are_apart) == (["node-1", "node-2"], ["node-1", "node-2"], False)
    apart = planned(Nodes.of("2+1"), 30)
    assert (apart.training, apart.serving, apart.are_apart) == (["node-1", "node-2"], ["node-3"], True)
    assert len(planned(Nodes.of(None), 30).all) == 1
    assert Nodes.of("2").taken([*TWO, Machine("10.0.0.3")]) == TWO


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((APART[2], APART[0]), "--ray: c only serves, but rank 0 runs on the machine of this command"),
        (APART[:2], "no node serves vLLM: give one the label atropos=vllm"),
        ((TWO[0], APART[2]), "label all nodes or none"),
    ],
)
def test_roles_that_make_no_run_are_refused(nodes: tuple[Machine, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Nodes.of(None).taken(nodes)


@pytest.mark.usefixtures("no_processes")
def test_a_run_goes_on_without_a_node_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the docs say: its run file, and a cluster without that node."""
    three = (*TWO, Machine("10.0.0.3"))
    on_cluster(monkeypatch, three)
    before = plan("arithmetic", "--ray", "auto", run_dir=tmp_path / "run")
    assert "count: 3" in before.files["run.yaml"]
    kept = tmp_path / "lost.yaml"
    kept.write_text(before.files["run.yaml"])
    on_cluster(monkeypatch, TWO)
    after = plan(str(kept), "--ray", "auto", run_dir=tmp_path / "again")
    assert list(by_name(after)) == ["api", "vllm-1", "vllm-2", "trainer", "trainer-2", "env"]


def test_more_nodes_serve_than_a_run_has_servers() -> None:
    with pytest.raises(ConfigError, match="66 Ray nodes serve, and a run has at most 64 vLLM servers: give fewer"):
        ask_for("arithmetic", "--ray", "auto", "--ray-nodes", "66", "--gpus", "8")


def test_the_command_that_continues_has_the_flags_of_machines_that_were_typed() -> None:
    flags = ["--ray", "local", "--ray-nodes", "2+1"]
    assert train.flags_of_machines(ask_for("arithmetic", *flags).given) == flags
    assert train.flags_of_machines(ask_for("arithmetic", *flags, "--ray-timeout", "60").given)[4:] == [
        "--ray-timeout",
        "60.0",
    ]


@pytest.mark.usefixtures("no_processes")
def test_each_node_gets_a_server_and_ranks_that_meet_on_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_name(on_two(monkeypatch, tmp_path, "--ray-timeout", "12"))
    assert list(found) == ["api", "vllm-1", "vllm-2", "trainer", "trainer-2", "env"]
    assert [name for name, service in found.items() if service.host] == ["vllm-2", "trainer-2"]
    far = list(found["trainer-2"].command)
    assert far[far.index("--silence-s") + 1] == "12"
    agent = far[far.index("--") + 1 :]
    assert agent[agent.index("--node-rank") + 1] == "1"
    assert agent[agent.index("--master-addr") + 1] == "10.0.0.1"
    assert found["vllm-2"].health == "http://10.0.0.2:9001/health"
    assert "a-key-of-the-user" not in str(found)


@pytest.mark.usefixtures("no_processes")
def test_trainer_and_environment_know_every_server_and_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = on_two(monkeypatch, tmp_path)
    assert made.trainer.vllm_servers == [("10.0.0.1", 9001), ("10.0.0.2", 9001)]
    assert getattr(made.trainer.bridge, "master_addr") == "10.0.0.1"  # noqa: B009  # of one mode
    (environment,) = made.environments.values()
    assert [each["base_url"] for each in environment.resolved["openai"]] == [
        "http://10.0.0.1:9001/v1",
        "http://10.0.0.2:9001/v1",
    ]
    assert {each["api_key_env"] for each in environment.resolved["openai"]} == {"VLLM_API_KEY"}
    reserved = "; Ray reserves 2 CPUs and 0 GPUs"
    assert machine_lines(made) == [
        "Machine 10.0.0.1: vllm-1 on port 9001, trainer rank 0 of 2, batching API on 127.0.0.1:8000, environments"
        + reserved,
        "Machine 10.0.0.2: vllm-2 on port 9001, trainer rank 1 of 2" + reserved,
        "Trainer ranks meet at 10.0.0.1:29500 within 600 s",
    ]


@pytest.mark.usefixtures("no_processes")
def test_gpus_are_those_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, list("01234567"))
    on_cluster(monkeypatch, TWO)
    words = ["gsm8k", str(MODEL), "--ray", "auto"]
    made = plan(*words)
    placement = made.site.placement
    assert [server.gpus for server in placement.servers] == [tuple("0123")] * 2
    assert "Each GPU of vllm-1, vllm-2 (0, 1, 2, 3 of a machine each)" in train.described(made, ask_for(*words))
    assert (placement.training, placement.apart) == ((tuple("4567"),) * 2, False)
    on_cluster(monkeypatch, APART)
    made = plan(*words)
    placement = made.site.placement
    assert [server.gpus for server in placement.servers] == [tuple("01234567")]
    assert (placement.training, placement.apart) == ((tuple("01234567"),) * 2, True)
    assert not placement.is_shared
    agents = [service for service in made.services if service.name.startswith("trainer")]
    assert [service.environment["CUDA_VISIBLE_DEVICES"] for service in agents] == ["0,1,2,3,4,5,6,7"] * 2
    for agent in agents:
        assert agent.command[agent.command.index("--nproc-per-node") + 1] == "8"


@pytest.mark.usefixtures("no_processes")
def test_nodes_with_other_numbers_of_gpus_each_share_out_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, list("01234567"))
    on_cluster(monkeypatch, (Machine("a", gpus=8), Machine("b", gpus=4), Machine("c", gpus=2)))
    made = plan("gsm8k", str(MODEL), "--ray", "auto")
    found, placement = by_name(made), made.site.placement
    assert [server.gpus for server in placement.servers] == [tuple("0123"), tuple("01"), tuple("0")]
    assert placement.training == (tuple("4567"), tuple("23"), tuple("1"))
    ranks = [found[name].command for name in ("trainer", "trainer-2", "trainer-3")]
    assert [words[words.index("--nproc-per-node") + 1] for words in ranks] == ["4", "2", "1"]
    seen = [found[name].environment["CUDA_VISIBLE_DEVICES"] for name in ("vllm-1", "vllm-2", "trainer-3")]
    assert seen == ["0,1,2,3", "0,1", "1"]
    assert [each["GPU"] for each in reservations(made)] == [8, 4, 2]
    assert "trainer ranks 4 to 5 of 7" in machine_lines(made)[1]
    on_cluster(monkeypatch, (Machine("a", gpus=8), Machine("b", serves=False, gpus=2), Machine("c", False, gpus=4))[1:])
    apart = plan("gsm8k", str(MODEL), "--ray", "auto", "--vllm.tensor-parallel-size", "4").site.placement
    assert ([server.gpus for server in apart.servers], len(apart.trainer)) == ([tuple("0123")], 8)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("gpus", "words", "why"),
    [
        (4, ["--trainer-ranks", "8"], "4 trainer ranks on node b, but its GPUs for the trainer are 2, 3"),
        (4, ["--vllm.tensor-parallel-size", "4"], "node b: layout: vLLM takes 0, 1, 2, 3, which leaves none"),
        (0, [], "node b has no GPUs, and the node of this command 8: use fewer nodes"),
    ],
)
def test_a_node_with_too_few_gpus_is_named(
    gpus: int, words: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(monkeypatch, list("01234567"))
    on_cluster(monkeypatch, (Machine("a", gpus=8), Machine("b", gpus=gpus)))
    with pytest.raises(ConfigError, match=why):
        plan("gsm8k", str(MODEL), "--ray", "auto", *words)


@pytest.mark.usefixtures("no_processes")
def test_a_command_on_a_node_without_the_gpus_of_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cluster(monkeypatch, (Machine("a", gpus=0), Machine("b", gpus=8)))
    with pytest.raises(
        ConfigError, match="node b has 8 GPUs, and the node of this command none: run it on a node with"
    ):
        plan("gsm8k", str(MODEL), "--ray", "auto")


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--bridge", "single_copy"], "a run on 2 Ray nodes needs a bridge that feeds several vLLM servers"),
        (["--trainer-ranks", "3"], "3 cannot be shared out evenly over 2 nodes"),
        (["--batch-invariant"], "--batch-invariant trains on one device, but 2 nodes train: give --ray-nodes 1\\+1"),
        (["--trainer.save-path", "/data/x"], "only checked for the run's, .*: leave the flag out and choose --runs"),
        (["--vllm.count", "3"], "--vllm.count 3, but the Ray cluster has 2 nodes that serve, and each runs one server"),
        (["--vllm.3.seed", "7"], "the vLLM servers of this run are 1 to 2"),
        (["--vllm-port", "1,2,3"], "is 3 ports, but this run has 2 vLLM"),
    ],
)
def test_what_one_machine_alone_can_do_is_refused(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=why):
        on_two(monkeypatch, tmp_path, *words)


@pytest.mark.usefixtures("no_processes")
def test_without_a_shared_file_system_checkpoints_are_rank_0_s_and_copied_before_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(*words: str) -> list[str]:
        command = list(by_name(on_two(monkeypatch, tmp_path, *words))["trainer-2"].command)
        return [command[index + 1] for index, word in enumerate(command) if word == "--sees"]

    assert seen() == [str(tmp_path / "run/run.json")]
    whole = ["--trainer.checkpoint-format", "hf"]
    assert seen(*whole) == []
    saved = tmp_path / "run/checkpoints"
    saved.mkdir(parents=True)
    (saved / "latest").write_text("step_4\n")
    assert seen(*whole) == []
    assert seen(*whole, "--trainer.resume", "auto") == [str(saved / "step_4/manifest.json")]


@pytest.mark.usefixtures("no_processes")
def test_copies_of_an_environment_are_spread_over_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: "a-token-of-this-start")
    made = on_two(monkeypatch, tmp_path, "--env.count", "4")
    found = by_name(made)
    names = [name for name in found if name.startswith("gsm8k_")]
    assert len(names) == 4
    assert [found[name].host for name in names] == ["", "10.0.0.2"] * 2
    urls = [made.environments[name].resolved["env"]["rollout_server_url"] for name in names]
    assert urls == ["http://127.0.0.1:8000", "http://10.0.0.1:8000"] * 2
    sent = [word for word in found[names[1]].command if word.endswith(f"{names[1]}.yaml")]
    assert len(sent) == 2  # the file that is sent, and the program's --config
    assert "--ray" not in found[names[2]].command
    assert "host: 0.0.0.0" in made.files["api.yaml"]
    assert [each["CPU"] for each in reservations(made)] == [2, 4]
    assert machine_lines(made)[1].startswith(
        f"Machine 10.0.0.2: vllm-2 on port 9001, trainer rank 1 of 2, {names[1]}, {names[3]}; Ray reserves 4 CPUs"
    )
    assert made.site.environ["ATROPOS_API_TOKEN"] == "a-token-of-this-start"
    assert "a-token-of-this-start" not in str(found) + str(made.files)


@pytest.mark.usefixtures("no_processes")
def test_the_api_stays_on_loopback_while_no_environment_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = on_two(monkeypatch, tmp_path)
    assert "host: 127.0.0.1" in made.files["api.yaml"]
    assert "ATROPOS_API_TOKEN" not in made.site.environ
