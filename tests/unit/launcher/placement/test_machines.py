"""Hosts files, and the plan of a run on several machines."""

from pathlib import Path

import psutil
import pytest

from atropos_launcher.commands import train
from atropos_launcher.placement.machines import SSH, Machine, read_machines
from atropos_launcher.plan.services import machine_lines
from atropos_launcher.service import Service
from atroposlib.flags import ConfigError
from tests.unit.launcher.plans import MODEL, ask_for, no_processes, on_gpus, plan

__all__ = ["no_processes"]

HERE = "env MACHINE={host}"  # a remote command that any machine has


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-the-user")


def hosts(folder: Path, text: str) -> str:
    (folder / "hosts.txt").write_text(text)
    return str(folder / "hosts.txt")


def test_a_line_is_a_host_and_what_it_does(tmp_path: Path) -> None:
    both = read_machines(Path(hosts(tmp_path, "gpu01  # here\n\n10.0.0.2\n")), SSH, 30, check_here=False)
    assert both.all == (Machine("gpu01"), Machine("10.0.0.2"))
    assert (both.training, both.serving, both.are_apart) == (["gpu01", "10.0.0.2"], ["gpu01", "10.0.0.2"], False)
    split = read_machines(Path(hosts(tmp_path, "a trainer\nb trainer\nc vllm\n")), SSH, 30, check_here=False)
    assert (split.training, split.serving, split.are_apart) == (["a", "b"], ["c"], True)


@pytest.mark.parametrize(
    ("text", "command", "why"),
    [
        ("", SSH, "names no machine"),
        ("a\nb gpu\n", SSH, "hosts.txt:2: 'b gpu' is not a host"),
        ("a\nb:9001\n", SSH, "hosts.txt:2: 'b:9001' is not a host"),
        ("a\nb\na\n", SSH, "hosts.txt:3: a appears twice"),
        ("a vllm\nb trainer\n", SSH, "a does not train"),
        ("a trainer\nb trainer\n", SSH, "no machine serves vLLM"),
        ("a\nb vllm\n", SSH, "give all machines both roles, or each exactly one"),
        ("a\nb\n", "ssh", "has no {host}"),
        ("a\nb\n", "ssh '{host}", "close the quote"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_line(text: str, command: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        read_machines(Path(hosts(tmp_path, text)), command, 30, check_here=False)


def test_the_first_machine_is_this_one_and_not_by_loopback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*is not this machine, whose addresses are"):
        read_machines(Path(hosts(tmp_path, "192.0.2.1\n198.51.100.9\n")), SSH, 30)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 is loopback"):
        read_machines(Path(hosts(tmp_path, "127.0.0.1\n198.51.100.9\n")), SSH, 30)
    own = [each.address for held in psutil.net_if_addrs().values() for each in held if each.family.name == "AF_INET"]
    for address in (each for each in own if not each.startswith("127.")):
        assert read_machines(Path(hosts(tmp_path, f"{address}\n198.51.100.9\n")), HERE, 30).first == address


def test_a_remote_command_that_is_not_here_is_named(tmp_path: Path) -> None:
    own = [each.address for held in psutil.net_if_addrs().values() for each in held if each.family.name == "AF_INET"]
    here = next(each for each in own if not each.startswith("127."))
    with pytest.raises(ConfigError, match="there is no program 'no-such-program' here: install it"):
        read_machines(Path(hosts(tmp_path, f"{here}\n198.51.100.9\n")), "no-such-program {host}", 30)


@pytest.mark.usefixtures("no_processes")
def test_a_run_goes_on_without_a_machine_that_is_lost(tmp_path: Path) -> None:
    """As the docs say: its run file, and a hosts file without that machine."""
    both = plan("arithmetic", "--hosts", hosts(tmp_path, "10.0.0.1\n10.0.0.2\n"), run_dir=tmp_path / "run")
    kept = tmp_path / "lost.yaml"
    kept.write_text(both.files["run.yaml"])
    assert "count: 2" in both.files["run.yaml"]
    alone = plan(str(kept), "--hosts", hosts(tmp_path, "10.0.0.1\n"), run_dir=tmp_path / "again")
    assert [service.name for service in alone.services] == ["api", "vllm", "trainer", "env"]


def test_more_machines_serve_than_a_run_has_servers(tmp_path: Path) -> None:
    many = hosts(tmp_path, "".join(f"10.0.0.{number}\n" for number in range(1, 67)))
    with pytest.raises(ConfigError, match="--hosts names 66 machines that serve, and a run has at most 64 vLLM"):
        ask_for("arithmetic", "--hosts", many)


def test_the_command_that_continues_has_the_flags_of_machines_that_were_typed(tmp_path: Path) -> None:
    flags = ["--hosts", hosts(tmp_path, "10.0.0.1\n10.0.0.2\n"), "--remote-command", "srun --nodelist={host}"]
    assert train.flags_of_machines(ask_for("arithmetic", *flags).given) == flags
    assert train.flags_of_machines(ask_for("arithmetic", *flags, "--host-timeout", "60").given)[4:] == [
        "--host-timeout",
        "60.0",
    ]


def on_two(folder: Path, *words: str, text: str = "10.0.0.1\n10.0.0.2\n") -> dict[str, Service]:
    made = plan("arithmetic", "--hosts", hosts(folder, text), *words, run_dir=folder / "run")
    return {service.name: service for service in made.services}


@pytest.mark.usefixtures("no_processes")
def test_each_machine_gets_a_server_and_ranks_and_only_the_others_are_reached_by_the_remote_command(
    tmp_path: Path,
) -> None:
    found = on_two(tmp_path, "--remote-command", "srun --nodelist={host}", "--host-timeout", "12")
    assert list(found) == ["api", "vllm-1", "vllm-2", "trainer", "trainer-2", "env"]
    assert [name for name, service in found.items() if service.host] == ["vllm-2", "trainer-2"]
    far = list(found["trainer-2"].command)
    assert far[far.index("--remote-command") + 1] == "srun --nodelist={host}"
    assert far[far.index("--silence-s") + 1] == "12"
    agent = far[far.index("--") + 1 :]
    assert agent[agent.index("--node-rank") + 1] == "1"
    assert agent[agent.index("--master-addr") + 1] == "10.0.0.1"
    assert found["vllm-2"].health == "http://10.0.0.2:9001/health"
    assert found["vllm-1"].health == "http://127.0.0.1:9001/health"  # only the machine itself asks it
    assert "a-key-of-the-user" not in str(found)


@pytest.mark.usefixtures("no_processes")
def test_trainer_and_environment_know_every_server_and_the_key(tmp_path: Path) -> None:
    made = plan("arithmetic", "--hosts", hosts(tmp_path, "10.0.0.1\n10.0.0.2\n"))
    assert made.trainer.vllm_servers == [("127.0.0.1", 9001), ("10.0.0.2", 9001)]
    assert getattr(made.trainer.bridge, "master_addr") == "10.0.0.1"  # noqa: B009  # of one mode
    (environment,) = made.environments.values()
    assert [each["base_url"] for each in environment.resolved["openai"]] == [
        "http://127.0.0.1:9001/v1",
        "http://10.0.0.2:9001/v1",
    ]
    assert {each["api_key_env"] for each in environment.resolved["openai"]} == {"VLLM_API_KEY"}
    assert machine_lines(made) == [
        "Machine 10.0.0.1: vllm-1 on port 9001, trainer rank 0 of 2, batching API on 127.0.0.1:8000, environments",
        "Machine 10.0.0.2: vllm-2 on port 9001, trainer rank 1 of 2",
        "Trainer ranks meet at 10.0.0.1:29500 within 600 s",
    ]


@pytest.mark.usefixtures("no_processes")
def test_gpus_are_those_of_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, list("01234567"))
    words = ["gsm8k", str(MODEL), "--hosts", hosts(tmp_path, "a\nb\n")]
    made = plan(*words)
    placement = made.site.placement
    assert [server.gpus for server in placement.servers] == [tuple("0123")] * 2
    assert "Each GPU of vllm-1, vllm-2 (0, 1, 2, 3 of a machine each)" in train.described(made, ask_for(*words))
    assert (placement.training, placement.apart) == ((tuple("4567"),) * 2, False)
    made = plan("gsm8k", str(MODEL), "--hosts", hosts(tmp_path, "a trainer\nb trainer\nc vllm\n"))
    placement = made.site.placement
    assert [server.gpus for server in placement.servers] == [tuple("01234567")]
    assert (placement.training, placement.apart) == ((tuple("01234567"),) * 2, True)
    assert not placement.is_shared
    agents = [service for service in made.services if service.name.startswith("trainer")]
    assert [service.environment["CUDA_VISIBLE_DEVICES"] for service in agents] == ["0,1,2,3,4,5,6,7"] * 2
    for agent in agents:
        assert agent.command[agent.command.index("--nproc-per-node") + 1] == "8"


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--bridge", "single_copy"], "--hosts needs a bridge that feeds several vLLM servers"),
        (["--trainer-ranks", "3"], "3 cannot be shared out evenly over 2 machines"),
        (["--batch-invariant"], "--batch-invariant trains on one device, but 2 machines train: write `trainer` behind"),
        (["--trainer.save-path", "/data/x"], "only checked for the run's, .*: leave the flag out and choose --runs"),
        (["--vllm.count", "3"], "--vllm.count 3, but --hosts names 2 machines that serve, and each runs one server"),
        (["--vllm.3.seed", "7"], "the vLLM servers of this run are 1 to 2"),
        (["--vllm-port", "1,2,3"], "is 3 ports, but this run has 2 vLLM"),
    ],
)
def test_what_one_machine_alone_can_do_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        on_two(tmp_path, *words)


@pytest.mark.usefixtures("no_processes")
def test_without_a_shared_file_system_checkpoints_are_rank_0_s_and_copied_before_a_resume(tmp_path: Path) -> None:
    def seen(*words: str) -> list[str]:
        command = list(on_two(tmp_path, *words)["trainer-2"].command)
        return [command[index + 1] for index, word in enumerate(command) if word == "--sees"]

    assert seen() == [str(tmp_path / "run/run.json")]
    whole = ["--trainer.checkpoint-format", "hf"]
    assert seen(*whole) == []
    saved = tmp_path / "run/checkpoints"
    saved.mkdir(parents=True)
    (saved / "latest").write_text("step_4\n")
    assert seen(*whole) == []
    assert seen(*whole, "--trainer.resume", "auto") == [str(saved / "step_4/manifest.json")]
