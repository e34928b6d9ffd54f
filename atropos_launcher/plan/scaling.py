"""Changes how many vLLM servers a run has while it goes on, as `atropos scale` asks (services/scale_request.py).

    more     start ──▶ it answers ──▶ the API lists it as joining ──▶ the trainer has fed it: serving
    fewer    the API lists it as leaving ──▶ no request runs on it ──▶ end ──▶ left

A thread does what waits; the supervisor's thread, which calls `look`, starts and ends services. The servers that come
last leave first. A run that is resumed begins with as many as its run file says.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.addresses import tensor_parallel_size, vllm_flags
from atropos_launcher.placement.gpus import ServerPlace
from atropos_launcher.placement.machines import Machine
from atropos_launcher.placement.ports import Ports
from atropos_launcher.plan.sections import KEY, VLLM_START_S
from atropos_launcher.plan.services import Plan, inference_server
from atropos_launcher.run_file.servers import MOST, server_name
from atropos_launcher.service import Service
from atropos_launcher.services.events import Event, Scaled
from atropos_launcher.services.health import answers
from atropos_launcher.services.records import ForeignRecord, Records
from atropos_launcher.services.scale_request import ScaleAnswer, read_request, write_answer
from atroposlib.addresses import server_address
from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, BatchingApi
from atroposlib.clients.one_request import NoReply, request
from atroposlib.errors import AtroposError
from atroposlib.wire import routes
from atroposlib.wire.bridge import ServerActivity
from atroposlib.wire.servers import ServerChange, State
from example_trainer.settings.bridges import LAUNCHED

T = TypeVar("T")
POLL_S = 0.5
JOIN_S = 3600.0  # for the trainer to finish the step that it is in
DRAIN_S = 600.0  # for requests that run on a server that leaves; the longest answers of a run are shorter
HEARD_S = 5.0  # after which every environment knows that a server leaves: they ask every 2 s
API_S = 60.0  # in which a batching API that is down has been started again
ASK_S = 5.0


class CannotScale(AtroposError):
    """The run cannot have so many servers, or a server did not come or go."""


class Supervises(Protocol):
    """The supervisor's part: called in its own thread, but for `watches`."""

    def add(self, service: Service) -> None: ...

    def retire(self, name: str) -> None: ...

    def watches(self, name: str) -> bool: ...


class Server(NamedTuple):
    """A vLLM server of the run; `place` counts all that it ever had."""

    place: int
    name: str
    url: str
    gpus: tuple[str, ...]


class Scaling:
    """The servers of one run, which is planned as `plan`, on a machine with these GPUs. `expect_fit` raises
    ConfigError for a plan that the machine has no memory for.
    """

    def __init__(
        self,
        plan: Plan,
        gpus: Iterable[str],
        ports: Ports,
        supervisor: Supervises,
        expect_fit: Callable[[Plan], None],
    ) -> None:
        self._plan, self._gpus, self._ports, self._supervisor = plan, tuple(gpus), ports, supervisor
        self._expect_fit = expect_fit
        self._records = Records(plan.site.run_dir)
        token = plan.trainer.atropos_token
        self._api = BatchingApi(plan.site.api, None if token is None else token.get_secret_value())
        placed = plan.site.placement.servers
        self._servers = [
            Server(number, server_name(number, len(placed)), url, place.gpus)
            for number, (url, place) in enumerate(zip(plan.site.vllm, placed, strict=True))
        ]
        self._joined: list[Server] = []  # of these, by `atropos scale`
        self._acts: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._over = threading.Event()
        self._answered = ""  # the id of the last request
        self._thread = threading.Thread(target=self._watch, name="Scaling", daemon=True)
        self._thread.start()

    def look(self) -> Iterator[Event]:
        """In the supervisor's thread: start and end what is to be, and give what there is to tell."""
        with suppress(queue.Empty):
            while True:
                act, done = self._acts.get_nowait()
                try:
                    act()
                except AtroposError as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)
        with suppress(queue.Empty):
            while True:
                yield self._told.get_nowait()

    def close(self) -> None:
        """Do nothing more."""
        self._over.set()
        self._thread.join(ASK_S)
        self._api.close()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            with suppress(ForeignRecord, OSError):  # the next look finds it again
                asked = read_request(self._records)
                if asked is not None and asked.id != self._answered:
                    self._answered = asked.id
                    self._answer(ScaleAnswer(asked.id), asked.vllm)
                self._forget_lost()

    def _answer(self, answer: ScaleAnswer, count: int) -> None:
        def say(line: str) -> None:
            self._told.put(Scaled(line))
            answer.lines.append(line)
            write()

        def write() -> None:
            if not self._over.is_set():  # else its directory is about to go
                with suppress(OSError):  # a full disk: launcher.log says it, too
                    write_answer(self._records, answer)

        try:
            self._scale(count, say)
        except AtroposError as error:
            self._told.put(Scaled(f"atropos scale: {error}"))
            answer.error = str(error)
        answer.done = True
        write()

    def _scale(self, count: int, say: Callable[[str], None]) -> None:
        mode = LAUNCHED[self._plan.run.kind]
        if not mode.feeds_several:
            able = " or ".join(kind for kind, other in LAUNCHED.items() if other.feeds_several)
            raise CannotScale(
                f"bridge {mode.shown()} feeds one vLLM server: start the run with bridge {able} to have several"
            )
        if not 1 <= count <= MOST:
            raise CannotScale(f"{count} vLLM servers: a run has 1 to {MOST}")
        if count == len(self._servers):
            say(f"The run has {count} vLLM server(s) already")
        begun: list[Server] = []
        refused: list[AtroposError] = []
        try:
            for _ in range(count - len(self._servers)):
                begun.append(self._start(say))
        except AtroposError as error:
            refused.append(error)
        for server in begun:
            try:
                self._join(server, say)
            except AtroposError as error:  # the others join all the same
                refused.append(error)
        if refused:
            raise CannotScale("; ".join(map(str, refused))) from refused[0]
        for server in self._servers[count:][::-1]:
            self._leave(server, say)

    def _start(self, say: Callable[[str], None]) -> Server:
        """Start one server more. Raises CannotScale, ConfigError, PortTaken, CannotStart."""
        port = self._ports.first_free(max(self._plan.site.vllm_ports) + 1)
        more = self._grown(port, say)
        place = len(more.run.servers) - 1
        flags = vllm_flags(more.run, more.site, more.trainer.bridge, place)
        # its end is not the run's
        service = replace(inference_server(more.run, more.site, place, flags), optional=True)
        try:
            self._do(lambda: self._supervisor.add(service))
        except AtroposError:
            self._release(more, place)
            raise
        self._plan = more
        server = Server(place, service.name, more.site.vllm[place], more.site.placement.servers[place].gpus)
        self._servers.append(server)
        self._joined.append(server)
        say(f"Started {server.name} at {server.url}, which loads the model (at most {VLLM_START_S:.0f} s)")
        return server

    def _grown(self, port: int, say: Callable[[str], None]) -> Plan:
        """The plan with one server more, for which there is room, and with Ray a reservation."""
        site = self._plan.site
        machines, place = site.machines, len(site.vllm_ports)
        if machines.several:  # whose memory the launcher does not see
            node = self._reserved(place, say)
            try:
                more = with_one_more(self._plan, port, self._free_gpus(node.host, node.gpu_names))
            except AtroposError:
                ray_cluster.release(machines.own_group(place))
                raise
            return with_host(more, place, node.host)
        held = {core for server in self._servers for core in site.cores.vllm[server.place]}
        cores = [core for core in sorted(os.sched_getaffinity(0)) if core not in held]
        more = with_one_more(self._plan, port, self._free_gpus(machines.first, self._gpus), cores)
        self._expect_fit(only(more, [*(server.place for server in self._servers), place]))
        return with_host(more, place, self._reserved(place, say).host) if machines.ray else more

    def _reserved(self, place: int, say: Callable[[str], None]) -> Machine:
        site = self._plan.site
        bundle = {"CPU": 1, "GPU": gpus_of_another(self._plan)}
        say(f"Waiting at most {ray_cluster.JOIN_S:.0f} s for a Ray node with {ray_cluster.shown(bundle)} free")
        name = site.machines.own_group(place)
        return ray_cluster.reserve_more(site.machines, site.model, bundle, name, self._is_still_asked)

    def _is_still_asked(self) -> bool:
        """Return whether the run goes on, and nobody has asked for another number meanwhile."""
        with suppress(ForeignRecord, OSError):
            asked = read_request(self._records)
            return not self._over.is_set() and asked is not None and asked.id == self._answered
        return not self._over.is_set()

    def _free_gpus(self, host: str, gpus: Sequence[str]) -> list[str]:
        """Those of a machine's GPUs that nothing of the run uses."""
        site = self._plan.site
        machines, placement = site.machines, site.placement
        own = [server for server in self._servers if machines.host_of_server(server.place) == host]
        taken = {gpu for server in own for gpu in server.gpus}
        if host in machines.training:
            taken |= {*placement.training[machines.training.index(host)]}
        if host == machines.first and site.teacher:
            taken |= {*site.teacher.gpus}
        return [gpu for gpu in gpus if gpu not in taken]

    def _join(self, server: Server, say: Callable[[str], None]) -> None:
        """Have the trainer feed a server that was started. Raises CannotScale, and the server is gone then."""
        began = time.monotonic()
        try:
            self._wait(
                f"{server.name} did not answer within {VLLM_START_S:.0f} s: see {server.name}.log",
                VLLM_START_S,
                lambda: answers(f"{server.url}/health"),
                server,
            )
            say(f"{server.name} answers after {time.monotonic() - began:.0f} s, and gets the policy at the next sync")
            self._change(server, "joining")
            self._wait(
                f"{server.name} was not fed within {JOIN_S:.0f} s: see trainer.log",
                JOIN_S,
                lambda: self._state(server) != "joining",
                server,
            )
            if self._state(server) != "serving":
                raise CannotScale(f"the trainer could not give {server.name} the policy: see trainer.log")
        except CannotScale:
            self._end(server)
            raise
        say(f"{server.name} serves the policy")

    def _leave(self, server: Server, say: Callable[[str], None]) -> None:
        """End a server once no request runs on it."""
        self._change(server, "leaving")
        say(f"{server.name} gets no new requests, and ends once it has answered (at most {DRAIN_S:.0f} s)")
        self._over.wait(HEARD_S)
        idle = f"requests still ran on {server.name} after {DRAIN_S:.0f} s"
        try:
            self._wait(idle, DRAIN_S, lambda: self._running(server) == 0, server)
        except CannotScale as error:
            say(f"{error}: they are tried again on the others")
        self._end(server)
        say(f"{server.name} has left")

    def _end(self, server: Server) -> None:
        if self._supervisor.watches(server.name):
            self._do(lambda: self._supervisor.retire(server.name))
        self._drop(server)

    def _drop(self, server: Server) -> None:
        self._servers.remove(server)
        if server in self._joined:
            self._joined.remove(server)
            self._release(self._plan, server.place)
        with suppress(CannotScale):
            self._change(server, "left")

    def _forget_lost(self) -> None:
        """Have nobody send to servers that died too often."""
        for server in [server for server in self._joined if not self._supervisor.watches(server.name)]:
            self._told.put(Scaled(f"{server.name} is not started again: the run has {len(self._servers) - 1} servers"))
            self._drop(server)

    def _release(self, plan: Plan, place: int) -> None:
        """Give back to Ray what was reserved for a server that joined."""
        machines = plan.site.machines
        if machines.ray and place in machines.joined:
            ray_cluster.release(machines.own_group(place))

    def _wait(self, otherwise: str, limit_s: float, is_done: Callable[[], bool], server: Server) -> None:
        give_up = time.monotonic() + limit_s
        while not is_done():
            if not self._supervisor.watches(server.name):
                raise CannotScale(f"{server.name} died: see {server.name}.log")
            if time.monotonic() > give_up or self._over.is_set():
                raise CannotScale("the run is over" if self._over.is_set() else otherwise)
            self._over.wait(POLL_S)

    def _do(self, act: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._acts.put((act, done))
        while not done.done():
            if self._over.wait(POLL_S / 5):
                raise CannotScale("the run is over")
        done.result()

    def _change(self, server: Server, state: State) -> None:
        self._asked(lambda: self._api.call(routes.CHANGE_SERVER, ServerChange(server.url, state)))

    def _state(self, server: Server) -> State | None:
        return self._asked(lambda: self._api.call(routes.SERVERS)).servers.get(server_address(server.url))

    def _asked(self, ask: Callable[[], T]) -> T:
        give_up = time.monotonic() + API_S
        while True:
            try:
                return ask()
            except ApiUnreachable as error:
                if time.monotonic() > give_up or self._over.wait(POLL_S):
                    raise CannotScale(f"the batching API at {self._api.url} does not answer: {error}") from error
            except ApiRefused as error:
                raise CannotScale(str(error)) from error

    def _running(self, server: Server) -> int:
        """Return how many requests a server generates for; 0 for one that does not answer any more."""
        key = self._plan.site.environ.get(KEY)
        try:
            reply = request("GET", f"{server.url}/v1/bridge/activity", connect_s=ASK_S, read_s=ASK_S, key=key or None)
        except NoReply as silent:
            return 1 if silent.timed_out else 0
        try:
            return msgspec.json.decode(reply.content, type=ServerActivity).running
        except msgspec.DecodeError as error:
            raise CannotScale(f"{server.url} does not say what it does (HTTP {reply.status})") from error


def with_one_more(plan: Plan, port: int, free_gpus: Sequence[str], free_cores: Sequence[int] = ()) -> Plan:
    """Return the plan with one more vLLM server, like the first, on this port and on the first of the GPUs that nothing
    uses. Where the first has cores of its own, it has as many of those that no server has, else the same. Raises
    CannotScale where there are too few GPUs.
    """
    first, site = plan.run.servers[0], plan.site
    needed = gpus_of_another(plan)
    if len(free_gpus) < needed:
        raise CannotScale(
            f"a further vLLM server needs {needed} GPU(s), and {len(free_gpus)} of its machine are free: stop what uses"
            " them, or start the run with fewer for the others"
        )
    gpus = tuple(free_gpus[:needed])
    cores = site.cores.vllm[0]
    if len(free_cores) >= len(cores):
        cores = tuple(free_cores[: len(cores)])
    own = {key: value for key, value in first.items() if key != "port"}
    run = plan.run.model_copy(update={"vllm": [*plan.run.servers, own]})
    grown = replace(
        site,
        vllm_ports=(*site.vllm_ports, port),
        placement=replace(site.placement, servers=(*site.placement.servers, ServerPlace(gpus))),
        cores=replace(site.cores, vllm=(*site.cores.vllm, cores)),
    )
    return replace(plan, run=run, site=grown)


def gpus_of_another(plan: Plan) -> int:
    """Return how many GPUs a server like the first one takes."""
    placement = plan.site.placement
    return max(tensor_parallel_size(plan.run.servers[0]), len(placement.servers[0].gpus)) if placement.on_gpus else 0


def with_host(plan: Plan, place: int, host: str) -> Plan:
    """Return the plan with its server of this place on a node that Ray has found."""
    machines = plan.site.machines
    joined = replace(machines, joined={**machines.joined, place: host})
    return replace(plan, site=replace(plan.site, machines=joined))


def only(plan: Plan, places: Sequence[int]) -> Plan:
    """Return the plan with these of its vLLM servers."""
    site = plan.site
    kept = replace(
        site,
        vllm_ports=tuple(site.vllm_ports[place] for place in places),
        placement=replace(site.placement, servers=tuple(site.placement.servers[place] for place in places)),
        cores=replace(site.cores, vllm=tuple(site.cores.vllm[place] for place in places)),
    )
    run = plan.run.model_copy(update={"vllm": [plan.run.servers[place] for place in places]})
    return replace(plan, run=run, site=kept)
