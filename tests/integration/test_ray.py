"""Services that Ray starts: on a cluster of this machine, and on two nodes that are network namespaces. What is lost
is named, and nothing runs on.
"""

import json
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from atropos_launcher.service import trainer_name
from example_trainer.ranks.place import LOST
from tests.integration.namespaces import Host
from tests.integration.ray_nodes import (
    SILENCE_S,
    Launched,
    address_of,
    end,
    far,
    found,
    head,
    node,
    raylet_of,
    started,
)

__all__ = ["far", "head"]

pytestmark = [pytest.mark.slow, pytest.mark.services]

SECRET = f"secret-{uuid.uuid4().hex}"
WAITS = "import time; print('up', flush=True); time.sleep(600)"


@contextmanager
def launched(folder: Path, host: Host | None, services: list[dict[str, object]], **plan: object) -> Iterator[Launched]:
    """A launcher of these services, which have a mark of their own as the last word of their command lines."""
    mark = f"mark-{uuid.uuid4().hex[:8]}"
    named = [{**each, "command": [*each["command"], mark]} for each in services]  # type: ignore[misc]
    text = json.dumps({"silence_s": SILENCE_S, "services": named, **plan})
    script, run = str(Path(__file__).with_name("ray_launch.py")), folder / mark

    def marked() -> list[psutil.Process]:
        return found(lambda each: each.cmdline()[-1:] == [mark] and "ray_client" not in " ".join(each.cmdline()))

    with started([script, str(run), text], folder, run, marked, host) as launcher:
        yield launcher


def service(text: str, number: int = 1, **fields: object) -> dict[str, object]:
    return {"name": f"service-{number}", "command": [sys.executable, "-uc", text], **fields}


def clients_of(run: Launched) -> list[psutil.Process]:
    """The processes by which the launcher holds its services."""
    return found(lambda each: "ray_client" in " ".join(each.cmdline()) and str(run.run) in each.cmdline())


def test_a_cluster_of_this_machine_runs_a_service_and_keeps_no_secret_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SECRET", SECRET)
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    text = "import os, time; print('got', os.environ['MINE'], len(os.environ['VLLM_API_KEY'])); time.sleep(3)"
    with launched(tmp_path, None, [service(text, environment={"MINE": SECRET[::-1]})], address="local") as run:
        run.says(f"got {SECRET[::-1]} {len(SECRET)}", run.run / "service-1.log")
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
        assert not [line for line in lines if SECRET in line]
        run.ends(0)
        run.expect_all_gone(5)
    logs = Path("/tmp/ray/session_latest").resolve()
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_service_has_its_exit_status_and_what_it_wrote_last(tmp_path: Path) -> None:
    text = "import os, sys; os.write(1, b'x' * 3_000_000 + b'last words'); sys.exit(3)"
    with launched(tmp_path, None, [service(text)], address="local") as run:
        run.ends(1)
        assert "service-1 (pid" in run.said
        assert "status 3" in run.said, run.said
        assert (run.run / "service-1.log").read_text().count("x" * 3_000_000 + "last words") == 1


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"CPU": 999}, "and this run needs 999 there"),
        ({"GPU": 8}, r"has \d+ GPUs, and this run needs 8 there: start its Ray with --num-gpus, or use fewer"),
        ({"model": "/no/such/model"}, "lacks the model /no/such/model: copy it there to the same path"),
    ],
)
def test_what_a_node_lacks_is_said_in_one_line_before_anything_starts(
    plan: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of a cluster that this one has nothing to do with
    with launched(tmp_path, None, [service(WAITS)], address="local", **plan) as run:
        run.ends(2)
        (line,) = run.said.splitlines()
        assert line.startswith("ray_launch: error: --ray: node 127.0.0.1 ")
        assert re.search(why, line), line
        assert not run.run.exists()


@pytest.mark.rotating
def test_what_must_be_shared_is_looked_for_before_a_service_starts(head: Host, far: Host, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    witness.write_text("of the launcher")
    away = ("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(tmp_path))
    plan = {"address": address_of(head), "nodes": "2", "sees": {str(witness): "copy it from {}"}}
    with (
        node(far, f"--address={address_of(head)}", first=away),
        launched(tmp_path, head, [service(WAITS), service("print('up')", 2)], **plan) as run,
    ):
        run.ends(1)
        assert f"service-2 on {far.address} (pid" in run.said
        assert re.search(rf"the launcher's {witness} is not on \S+: copy it from {head.address}", run.said), run.said
        assert "up" not in (run.run / "service-2.log").read_text().splitlines()


@pytest.mark.rotating
def test_a_full_cluster_is_named_with_what_the_run_needs(head: Host, tmp_path: Path) -> None:
    plan = {"address": address_of(head), "CPU": 3}
    with launched(tmp_path, head, [service(WAITS)], **plan) as first:
        first.says("up", first.run / "service-1.log")
        with launched(tmp_path, head, [service(WAITS)], **plan) as second:
            second.ends(2)
            (line,) = second.said.splitlines()
            assert f"node {head.address} is full: 3 CPUs and 0 GPUs were not free within 20 s of the 4 CPUs" in line
            assert "end what holds them (`ray status -v`)" in line
        first.says("up", first.run / "service-1.log")


@pytest.mark.rotating
def test_a_late_node_is_waited_for_and_a_cut_cable_ends_the_run_on_both_sides(
    head: Host, far: Host, tmp_path: Path
) -> None:
    services = [service(WAITS, number) for number in (1, 2)]
    with launched(tmp_path, head, services, address=address_of(head), nodes="2") as run:
        run.says("for 2 Ray nodes; 1 there")
        with node(far, f"--address={address_of(head)}"):
            for number in (1, 2):
                run.says("up", run.run / f"service-{number}.log")
            far.set_cable("down")
            run.ends(1, within_s=SILENCE_S + 40)
            assert f"no sign of life for {SILENCE_S} s from {far.address}" in run.said, run.said
            assert f"service-2 on {far.address} (pid" in run.said
            run.expect_all_gone(SILENCE_S + 30)


@pytest.mark.rotating
def test_a_killed_raylet_ends_what_runs_there_and_the_node_is_named(head: Host, far: Host, tmp_path: Path) -> None:
    services = [service(WAITS, number) for number in (1, 2)]
    with (
        node(far, f"--address={address_of(head)}") as ray,
        launched(tmp_path, head, services, address=address_of(head), nodes="2") as run,
    ):
        for number in (1, 2):
            run.says("up", run.run / f"service-{number}.log")
        raylet_of(ray).kill()
        run.ends(1, within_s=SILENCE_S + 40)
        assert f"service-2 on {far.address} (pid" in run.said
        assert re.search(rf"error: .* from {far.address}, \d+ s after its start: check that the node is up", run.said)
        assert "(raylet)" not in run.said  # twenty lines of a log of Ray's, as it prints them by itself
        run.expect_all_gone(SILENCE_S + 20)


@pytest.mark.rotating
def test_a_service_that_dies_is_started_again_also_on_a_node_that_was_lost(
    head: Host, far: Host, tmp_path: Path
) -> None:
    """As vLLM on a node that only serves: the run goes on without it, and takes it back."""
    services = [service(WAITS, 1), service(f"{WAITS}  # serves", 2, may_end=False, restarts=3)]
    with launched(tmp_path, head, services, address=address_of(head), nodes="2") as run:
        log = run.run / "service-2.log"
        with node(far, f"--address={address_of(head)}") as ray:
            run.says("up", log)
            end([each for each in run.processes() if "serves" in " ".join(each.cmdline())])
            run.says("\nup", log, times=2)
            assert f"service-2 on {far.address} (pid" in run.said
            raylet_of(ray).kill()
            run.says(f"service-2 on {far.address} (pid", times=2)
        with node(far, f"--address={address_of(head)}"):
            run.says("\nup", log, times=3, within_s=150)
        assert run.process.poll() is None


@pytest.mark.rotating
@pytest.mark.parametrize("who", ["launcher", "driver"])
def test_services_of_a_killed_launcher_or_driver_end_on_every_node(
    who: str, head: Host, far: Host, tmp_path: Path
) -> None:
    services = [service(WAITS, number) for number in (1, 2)]
    with (
        node(far, f"--address={address_of(head)}"),
        launched(tmp_path, head, services, address=address_of(head), nodes="2") as run,
    ):
        for number in (1, 2):
            run.says("up", run.run / f"service-{number}.log")
        if who == "launcher":
            run.process.send_signal(signal.SIGKILL)
        else:
            (client,) = (each for each in clients_of(run) if far.address in each.cmdline())
            client.kill()
            run.ends(1, within_s=SILENCE_S + 20)
            assert f"service-2 on {far.address} (pid" in run.said
        run.expect_all_gone(SILENCE_S + 20)


@pytest.mark.rotating
def test_a_launcher_that_stands_still_loses_its_services(head: Host, far: Host, tmp_path: Path) -> None:
    """A node cannot tell it from one behind a cut cable."""
    services = [service(WAITS, number) for number in (1, 2)]
    with (
        node(far, f"--address={address_of(head)}"),
        launched(tmp_path, head, services, address=address_of(head), nodes="2") as run,
    ):
        for number in (1, 2):
            run.says("up", run.run / f"service-{number}.log")
        (client,) = (each for each in clients_of(run) if far.address in each.cmdline())
        client.suspend()
        try:
            deadline = time.monotonic() + SILENCE_S + 15
            while len(run.processes()) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            end([client])


def ranks(drill: str, hosts: list[Host], counts: tuple[int, int]) -> list[dict[str, object]]:
    """An agent of torchrun on each node, as `atropos train --ray` has them, with ranks that only add."""
    command = [sys.executable, "-u", "-m", "example_trainer.ranks.agent", "--nnodes", "2"]
    command += ["--master-addr", hosts[0].address, "--master-port", "29500", "--rdzv-conf", "timeout=60"]
    made: list[dict[str, object]] = []
    for number, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        own = ["--node-rank", str(number), "--local-addr", host.address, "--nproc-per-node", str(count)]
        made.append(
            {
                "name": trainer_name(number),
                "command": [*command, *own, "--module", "tests.integration.machine_child"],
                "environment": {"DRILL": drill, "OMP_NUM_THREADS": "1"},
                "missing_another": LOST,
            }
        )
    return made


@pytest.mark.rotating
def test_ranks_of_nodes_with_other_numbers_of_gpus_meet_and_add(head: Host, far: Host, tmp_path: Path) -> None:
    services = ranks("", [head, far], (2, 1))
    with (
        node(far, f"--address={address_of(head)}"),
        launched(tmp_path, head, services, address=address_of(head), nodes="2") as run,
    ):
        run.ends(0)
        logs = [(run.run / f"{trainer_name(number)}.log").read_text() for number in range(2)]
        assert all(f"rank {rank} of 3: sum 6" in logs[rank == 2] for rank in range(3)), logs
        run.expect_all_gone(5)


@pytest.mark.rotating
def test_the_node_whose_rank_was_killed_is_named_and_not_the_one_that_misses_it(
    head: Host, far: Host, tmp_path: Path
) -> None:
    services = ranks("kill", [head, far], (1, 1))
    with (
        node(far, f"--address={address_of(head)}"),
        launched(tmp_path, head, services, address=address_of(head), nodes="2") as run,
    ):
        run.ends(1)
        assert f"trainer-2 on {far.address} (pid" in run.said
        assert f"grpo: error: trainer rank 1 on {far.address} was ended by SIGKILL" in run.said
        assert run.said.count("died:") == 1, run.said
        run.expect_all_gone(10)
