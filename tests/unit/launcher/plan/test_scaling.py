"""`atropos scale` in a run's launcher: servers that are started, fed, drained and ended, without a process."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from atropos_launcher.commands.existing_runs.scale import scale
from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.machines import Machine, Machines
from atropos_launcher.placement.ports import Ports
from atropos_launcher.plan import scaling
from atropos_launcher.plan.scaling import CannotScale, Scaling, only, with_one_more
from atropos_launcher.plan.services import Plan
from atropos_launcher.service import LAUNCHER, Service
from atropos_launcher.services.events import Scaled
from atropos_launcher.services.records import Record, Records
from atropos_launcher.services.scale_request import ScaleAnswer, ScaleRequest, read_answer, write_request
from atroposlib.addresses import server_address
from atroposlib.errors import AtroposError
from atroposlib.flags import ConfigError
from tests.serving import Asked, Reply, ThreadedServer, free_port
from tests.unit.launcher.plans import no_processes, on_gpus, plan
from tests.waiting import wait_until

__all__ = ["no_processes"]
pytestmark = pytest.mark.usefixtures("no_processes")


class Api:
    """Lists servers; a trainer that feeds whatever joins, unless it `refuses`."""

    def __init__(self) -> None:
        self.listed: dict[str, str] = {}
        self.changes: list[tuple[int, str]] = []  # port, state
        self.refuses = False

    def answer(self, asked: Asked) -> Reply:
        if asked.method == "POST":
            change = json.loads(asked.body)
            self.listed[server_address(change["url"])] = change["state"]
            self.changes.append((urlsplit(change["url"]).port or 0, change["state"]))
            return Reply(body=b'{"status": "success"}')
        for url, state in self.listed.items():
            if state == "joining":
                self.listed[url] = "left" if self.refuses else "serving"
        return Reply(body=json.dumps({"servers": self.listed}).encode())


class Servers:
    """The supervisor: vLLM servers are threads here."""

    def __init__(self) -> None:
        self.started: dict[str, Service] = {}
        self.alive: dict[str, ThreadedServer] = {}
        self.running = 0  # requests on each
        self.start = True
        self.die: tuple[str, ...] = ()  # while they load

    def add(self, service: Service) -> None:
        self.started[service.name] = service
        if self.start and service.name not in self.die:
            assert service.health is not None
            self.alive[service.name] = ThreadedServer(self.answer, urlsplit(service.health).port or 0)

    def answer(self, asked: Asked) -> Reply:
        return Reply(body=json.dumps({"generating_s": 0.0, "running": self.running}).encode())

    def retire(self, name: str) -> None:
        self.alive.pop(name).close()

    def watches(self, name: str) -> bool:
        return name in self.alive or name == "vllm"


class Run:
    """A launcher's part: it looks now and then, and its directory has the records."""

    def __init__(self, folder: Path, of: Plan, api: Api, gpus: list[str]) -> None:
        self.api, self.servers, self.told = api, Servers(), list[str]()
        self.refusal, self.room = "", 64  # servers
        self.records = Records(folder)
        self.records.folder.mkdir()
        self._scaling = Scaling(of, gpus, Ports(), self.servers, self.expect_fit)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.look)
        self._thread.start()

    def expect_fit(self, more: Plan) -> None:
        self.planned = more
        if self.refusal or len(more.run.servers) > self.room:
            raise ConfigError(self.refusal or "no room")

    def look(self) -> None:
        while not self._over.wait(0.01):
            self.told += [event.text for event in self._scaling.look() if isinstance(event, Scaled)]

    def ask(self, count: int) -> ScaleRequest:
        write_request(self.records, asked := ScaleRequest.of(count))
        return asked

    def scale(self, count: int) -> ScaleAnswer:
        asked = self.ask(count)
        wait_until(lambda: (answer := read_answer(self.records)) and answer.id == asked.id and answer.done, 20)
        answer = read_answer(self.records)
        assert answer is not None
        return answer

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._scaling.close()
        for server in self.servers.alive.values():
            server.close()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Api, int]]:
    monkeypatch.setattr(scaling, "POLL_S", 0.02)
    monkeypatch.setattr(scaling, "HEARD_S", 0.1)
    listing = Api()
    with ThreadedServer(listing.answer) as server:
        yield listing, server.port


@pytest.fixture
def run(api: tuple[Api, int], tmp_path: Path) -> Iterator[Run]:
    listing, port = api
    words = ("two_servers", "--vllm.count", "1", "--api-port", str(port), "--vllm-port", str(free_port()))
    with closing(Run(tmp_path, plan(*words, run_dir=tmp_path), listing, [])) as made:
        yield made


def test_a_run_gets_servers_that_are_fed_before_they_count_and_gives_them_back_drained(run: Run) -> None:
    answer = run.scale(3)
    assert answer.error == ""
    assert list(run.servers.started) == ["vllm-2", "vllm-3"]
    seeds = [service.command[service.command.index("--seed") + 1] for service in run.servers.started.values()]
    assert seeds == ["2", "3"]  # servers of one seed would sample the same answers
    assert all(service.optional and service.restarts for service in run.servers.started.values())
    second, third = (urlsplit(service.health or "").port for service in run.servers.started.values())
    assert run.api.changes == [(second, "joining"), (third, "joining")]
    assert answer.lines[-1] == "vllm-3 serves the policy"
    run.servers.running = 1
    asked = run.ask(2)
    wait_until(lambda: (third, "leaving") in run.api.changes)
    time.sleep(0.3)
    assert "vllm-3" in run.servers.alive  # it still answers
    run.servers.running = 0
    wait_until(lambda: (last := read_answer(run.records)) and last.id == asked.id and last.done)
    assert run.api.changes[2:] == [(third, "leaving"), (third, "left")]
    assert list(run.servers.alive) == ["vllm-2"]
    assert run.scale(3).error == ""
    assert list(run.servers.started)[-1] == "vllm-4"  # a log of its own
    assert len(run.planned.run.servers) == 3  # of those that are there
    assert run.scale(3).lines == ["The run has 3 vLLM server(s) already"]


def test_a_server_that_the_trainer_refuses_or_that_dies_is_gone_and_the_cause_is_named(run: Run) -> None:
    run.api.refuses = True
    assert run.scale(2).error == "the trainer could not give vllm-2 the policy: see trainer.log"
    assert run.servers.alive == {}
    run.servers.start = False
    assert run.scale(2).error == "vllm-3 died: see vllm-3.log"
    assert run.api.changes[-1][1] == "left"


def test_a_server_that_is_not_started_again_is_reported_as_left(run: Run) -> None:
    assert run.scale(2).error == ""
    run.servers.retire("vllm-2")
    wait_until(lambda: run.api.changes[-1][1] == "left")
    wait_until(lambda: "vllm-2 is not started again: the run has 1 servers" in run.told)


@pytest.mark.parametrize(("count", "why"), [(0, "0 vLLM servers: a run has 1 to 64"), (65, "65 vLLM servers")])
def test_a_number_that_no_run_has_is_refused(run: Run, count: int, why: str) -> None:
    assert why in run.scale(count).error


def test_a_server_that_the_machine_has_no_memory_for_is_refused_before_it_starts(run: Run) -> None:
    run.refusal = "it needs 12 GB, and 3 GB are free"
    assert run.scale(2).error == "it needs 12 GB, and 3 GB are free"
    assert run.servers.started == {}


def test_servers_that_have_room_join_though_another_has_none(run: Run) -> None:
    run.room = 2
    answer = run.scale(3)
    assert answer.error == "no room"
    assert answer.lines[-1] == "vllm-2 serves the policy"
    assert list(run.servers.alive) == ["vllm-2"]


def test_the_others_join_though_one_dies_and_each_cause_is_named(run: Run) -> None:
    run.servers.die = ("vllm-2", "vllm-4")
    answer = run.scale(4)
    assert answer.error == "vllm-2 died: see vllm-2.log; vllm-4 died: see vllm-4.log"
    assert answer.lines[-1] == "vllm-3 serves the policy"
    assert list(run.servers.alive) == ["vllm-3"]
    assert run.scale(2).lines == ["The run has 2 vLLM server(s) already"]


def test_a_run_without_a_trainer_is_told_at_once(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.claim()
    for name in (LAUNCHER, "vllm"):
        records.write(Record.of(name, os.getpid()))
    with pytest.raises(AtroposError, match="has no trainer that would feed a server: it runs vllm"):
        scale(tmp_path, 2)
    records.release()


@pytest.mark.parametrize("bridge", ["single_copy", "lora", "reload", "restart"])
def test_a_bridge_that_feeds_one_server_refuses_another_by_name(
    api: tuple[Api, int], tmp_path: Path, bridge: str
) -> None:
    listing, port = api
    of = plan("gsm8k", "some/model-1B", "--bridge", bridge, "--api-port", str(port), run_dir=tmp_path)
    with closing(Run(tmp_path, of, listing, [])) as run:
        error = run.scale(2).error
        assert "feeds one vLLM server: start the run with bridge broadcast" in error


class Ray:
    """A cluster that has room on one node, of this name; what it holds by the names of its groups."""

    def __init__(self, host: str) -> None:
        self.host, self.held = host, dict[str, dict[str, float]]()

    def reserve_more(self, machines: Machines, model: str, bundle: dict[str, float], name: str, _: object) -> Machine:
        if not self.host:
            raise ConfigError("--ray: no node of the cluster has 1 CPUs and 0 GPUs free")
        self.held[name] = bundle
        return Machine(self.host, trains=False, gpus=0)

    def release(self, name: str) -> None:
        del self.held[name]


@pytest.mark.parametrize(("nodes", "host"), [("1", "127.0.0.1"), ("2", "localhost")])
def test_on_ray_a_server_gets_a_node_and_gives_back_what_it_held(
    api: tuple[Api, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, host: str
) -> None:
    listing, port = api
    ray = Ray(host)
    monkeypatch.setattr(ray_cluster, "reserve_more", ray.reserve_more)
    monkeypatch.setattr(ray_cluster, "release", ray.release)
    words = ("two_servers", "--api-port", str(port), "--vllm-port", str(free_port()), "--ray", "auto")
    with closing(Run(tmp_path, plan(*words, "--ray-nodes", nodes, run_dir=tmp_path), listing, [])) as run:
        answer = run.scale(3)
        assert answer.error == ""
        assert answer.lines[0] == "Waiting at most 600 s for a Ray node with 1 CPUs and 0 GPUs free"
        assert ray.held == {"atropos-server-2": {"CPU": 1, "GPU": 0}}
        (service,) = run.servers.started.values()
        assert urlsplit(service.health or "").hostname == host
        given = {flag: service.command[service.command.index(flag) + 1] for flag in ("--group", "--host")}
        assert given == {"--group": "atropos-server-2", "--host": host}
        assert run.scale(2).lines[-1] == "vllm-3 has left"
        assert ray.held == {}


def test_a_cluster_without_room_says_so_and_nothing_starts(
    api: tuple[Api, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, port = api
    monkeypatch.setattr(ray_cluster, "reserve_more", Ray("").reserve_more)
    words = ("two_servers", "--api-port", str(port), "--ray", "auto", "--ray-nodes", "2")
    with closing(Run(tmp_path, plan(*words, run_dir=tmp_path), listing, [])) as run:
        assert run.scale(3).error == "--ray: no node of the cluster has 1 CPUs and 0 GPUs free"
        assert run.servers.started == {}


def test_a_further_server_takes_gpus_that_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0", "1", "2", "3"])
    planned: Any = plan("gsm8k", "some/model-1B", "--bridge", "broadcast", "--vllm.tensor-parallel-size", "1")
    more = with_one_more(planned, 9100, ["2", "3"])
    assert more.site.placement.servers[-1].gpus == ("2",)
    assert more.site.vllm_ports[-1] == 9100
    assert only(more, [1]).site.vllm_ports == (9100,)
    with pytest.raises(CannotScale, match=r"needs 1 GPU\(s\), and 0 of its machine are free"):
        with_one_more(planned, 9100, [])


def test_a_further_server_takes_cores_that_no_server_has_where_the_first_has_its_own() -> None:
    first = min(os.sched_getaffinity(0))
    pinned = plan("two_servers", "--vllm.count", "1", "--layout.cores.vllm", f"[{first}]")
    assert with_one_more(pinned, 9100, [], [first + 1, first + 2]).site.cores.vllm == ((first,), (first + 1,))
    assert with_one_more(pinned, 9100, [], []).site.cores.vllm == ((first,), (first,))
    free = plan("two_servers", "--vllm.count", "1")
    assert with_one_more(free, 9100, [], [first]).site.cores.vllm == ((), ())


def test_a_run_that_does_not_run_is_told_with_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run, name in ((Path("runs/mine"), "mine"), (Path("my runs/other"), "'my runs/other'")):
        run.mkdir(parents=True)
        with pytest.raises(AtroposError, match=f"{run} is not running: `atropos train --resume {name}` continues it"):
            scale(run, 2)
