"""Mode sglang: whole weights by broadcast to SGLang servers, which load them by their Hugging Face names.

    trainer ──HTTP: pause → begin → {names of bucket k} ... → end → version → continue──▶ SGLang's API process
    bucket k ──one Gloo/NCCL broadcast──▶ scheduler ranks 1..TP, which load it into the weights they compute with

SGLang has no staging buffer and no session. Generation is paused from the first bucket to the last, and requests under
way are computed again from their tokens (mode retract). A sync that fails never continues generation: the server stays
paused, the error names it, the step and its state, and the first sync of the next trainer repairs it. That sync also
overwrites the server's weights with random ones first, so that the parity probe sees a tensor that never came.
"""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from atroposlib.clients.waiting import NotYet, Wait, wait_for, waiting
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import DTYPE_BYTES, Bucket, Manifest, lay_out
from example_trainer.bridges.base import BridgeError, Prepared, SyncReport, WeightBridge
from example_trainer.bridges.each_server import ServerThreads
from example_trainer.bridges.parity import parity
from example_trainer.bridges.server_link import Rendezvous, listen
from example_trainer.bridges.session import told
from example_trainer.bridges.vllm_client import FOREVER, QUICK_S, NoAnswer, Refused, ServerClient
from example_trainer.settings.bridges import Sglang
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.source import shapes_of
from example_trainer.weights.written import TrainedModel
from vllm_patching import transport

log = get_logger(__name__)

TESTED = "0.5.23"  # the release of scripts/sglang.lock
REFUSAL_S = 1.0  # a request to join is refused at once, or waits for the trainer
POLL_S = 0.002
UNCHANGED = "with its previous weights"
REMEDY = (
    "Start the trainer again: its first sync replaces every weight and continues generation. If that fails too, restart"
    " the SGLang server"
)


def prepare(config: TrainerConfig, source: str, device: torch.device) -> Prepared:
    """Listen where SGLang's ranks will come. Raises BridgeError if a server on another machine could not reach it."""
    rendezvous = listen(config, config.mode(Sglang))
    return Prepared(partial(SglangBridge, config, rendezvous), rendezvous.close)


class Done(msgspec.Struct):
    """The reply to every order. A failure comes with status 400."""

    message: str


class ServerInfo(msgspec.Struct):
    """GET /server_info, as far as it is read."""

    version: str
    dtype: str
    tp_size: int
    dp_size: int = 1
    pp_size: int = 1


class ModelInfo(msgspec.Struct):
    """GET /model_info, as far as it is read."""

    model_path: str
    model_type: str | None = None


class ScoredTokens(msgspec.Struct):
    """[log-probability, token id, text] of each token of the prompt; the first has no log-probability."""

    input_token_logprobs: list[tuple[float | None, int, str | None]]


class Generated(msgspec.Struct):
    """The reply of /generate, as far as it is read."""

    meta_info: ScoredTokens


class SglangClient(ServerClient):
    """One SGLang server. Its --admin-api-key, where it has one, is needed for orders and for nothing else."""

    software = "SGLang"

    def wait_until_ready(self, deadline_s: float) -> tuple[ServerInfo, ModelInfo]:
        """Return what the server serves, and how, once it answers. Raises BridgeError at the deadline."""

        def absent(reason: str) -> BridgeError:
            return BridgeError(
                f"no SGLang server at {self.url} after {deadline_s:.0f} s: {reason}; start `python -m"
                " sglang.launch_server` there, or set --vllm-host/--vllm-port"
            )

        return wait_for(self._looked_at, Wait("the SGLang server", self.url, deadline_s, absent))

    def _looked_at(self) -> tuple[ServerInfo, ModelInfo]:
        try:
            return self.ask(ServerInfo, "GET", "/server_info", timeout_s=QUICK_S), self.ask(
                ModelInfo, "GET", "/model_info", timeout_s=QUICK_S
            )
        except NoAnswer as silent:
            raise NotYet(f"no answer ({silent.__cause__})") from silent

    def order(self, path: str, body: object = None, timeout_s: float = FOREVER) -> None:
        """One step of a sync. Raises BridgeError."""
        self.ask(Done, "POST", path, {} if body is None else body, timeout_s)

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """SGLang's log-probability of each prompt token but the first."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scored = self.ask(Generated, "POST", "/generate", body).meta_info.input_token_logprobs
        known = [logprob for logprob, token, _ in scored if logprob is not None]
        if [token for _, token, _ in scored] != token_ids or len(known) != len(token_ids) - 1:
            raise BridgeError(f"{self.url} scored {len(known)} tokens of a prompt of {len(token_ids)}, not all but one")
        return known


class SglangLink:
    """The process group of the trainer (rank 0) and one server's ranks. Raises BridgeError if these do not come."""

    def __init__(self, admin: SglangClient, ranks: int, rendezvous: Rendezvous, backend: str) -> None:
        self.admin = admin
        self._timeout_s = rendezvous.timeout_s
        self._backend = backend
        self._name = f"atropos-{uuid.uuid4().hex[:8]}"
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="SglangOrders")
        store: dist.Store = transport.join_store(rendezvous.address, rendezvous.port, self._timeout_s)
        # as torch.distributed nests keys for the group that SGLang makes by init_custom_process_group
        for prefix in (self._name, f"{self._name}/", "cuda/" if backend == "nccl" else "cpu/"):
            store = dist.PrefixStore(prefix, store)
        offer = {
            "master_address": rendezvous.address,
            "master_port": rendezvous.port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": self._name,
            "backend": backend,
        }
        with ExitStack() as undo:
            undo.callback(self._orders.shutdown, wait=False)
            joined = self._orders.submit(admin.order, "/init_weights_update_group", offer)
            if wait([joined], REFUSAL_S).done:
                joined.result()
            with waiting(log, f"{ranks} rank(s) of SGLang", peer=admin.url, deadline_s=self._timeout_s):
                self._group = self._formed(store, 1 + ranks, rendezvous.address)
            joined.result()
            undo.pop_all()
        log.info("[Bridge] ✓ %s group created with %d rank(s) of %s", backend.upper(), ranks, admin.url)

    def begin(self) -> None:
        """Let the server take weights."""
        try:
            self.admin.order("/begin_weight_update")
        except Refused as refused:
            if "already open" not in str(refused):
                raise
            log.warning("[Bridge] %s: ending a weight update that an earlier trainer left unfinished", self.admin.url)
            self.admin.order("/end_weight_update")
            self.admin.order("/begin_weight_update")

    def send(self, bucket: Bucket, packed: torch.Tensor, *, last: bool) -> None:
        """One bucket, until the server has loaded it. The last one drops the cache that the old weights filled."""
        names = [tensor.name for tensor in bucket.tensors]
        order = {
            "names": names,
            "dtypes": [tensor.dtype for tensor in bucket.tensors],
            "shapes": [tensor.shape for tensor in bucket.tensors],
            "group_name": self._name,
            "flush_cache": last,
            "load_format": "flattened_bucket",
        }
        loaded = self._orders.submit(self.admin.order, "/update_weights_from_distributed", order)
        give_up = time.monotonic() + self._timeout_s
        try:
            sent = self._group.broadcast([packed], transport.from_rank_0())
            while not (sent.is_completed() or loaded.done() or time.monotonic() > give_up):
                wait([loaded], POLL_S)
            if loaded.done():  # refused: nobody will ever receive
                loaded.result()
            sent.wait()
        except BridgeError:
            raise
        except RuntimeError as error:  # torch.distributed's, for a dead or silent peer
            raise BridgeError(
                f"{names[0]} and the {len(names) - 1} tensors after it did not reach the server within"
                f" {self._timeout_s:.0f} s: {transport.describe(error)}"
            ) from error
        loaded.result()

    def close(self) -> None:
        """Leave the group, whatever its state."""
        with told(f"Left {self.admin.url}, but its side of the group {self._name} remains"):
            self.admin.order("/destroy_weights_update_group", {"group_name": self._name}, QUICK_S)
        if self._backend == "nccl":
            self._group.abort()
        self._orders.shutdown(wait=False)
        del self._group

    def _formed(self, store: dist.Store, size: int, address: str) -> transport.Group:
        try:
            if self._backend == "nccl":
                return transport.nccl_group(store, 0, size, self._timeout_s)
            return transport.gloo_group(store, 0, size, self._timeout_s, address)
        except RuntimeError as error:
            raise BridgeError(
                f"the ranks of {self.admin.url} did not join at {address} within {self._timeout_s:.0f} s:"
                f" {transport.describe(error)}; see its log"
            ) from error


class SglangBridge(WeightBridge):
    """Trainer side of SGLang's weight update, for one server or several that serve one model in one dtype."""

    def __init__(self, config: TrainerConfig, rendezvous: Rendezvous, trained: TrainedModel) -> None:
        self._trained = trained
        self._rendezvous = rendezvous
        self._links: list[SglangLink] = []
        self._synced, self._reset = False, config.mode(Sglang).reset
        mode = config.mode(Sglang)
        automatic = "nccl" if trained.model.device.type == "cuda" else "gloo"
        backend = automatic if mode.backend == "auto" else mode.backend
        key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
        admin_key = mode.admin_api_key.get_secret_value() if mode.admin_api_key else key
        give_up = time.monotonic() + config.vllm_start_timeout
        self._servers = [SglangClient(*at, key, config.bridge_timeout_s) for at in config.vllm_servers]
        self._threads = ServerThreads()
        infos = [server.wait_until_ready(max(0.0, give_up - time.monotonic())) for server in self._servers]
        for server, (info, model) in zip(self._servers, infos, strict=True):
            check_server(server.url, info, model, trained.model.config.model_type)
        dtypes = {dtype_of(info.dtype) for info, _ in infos}
        if len(dtypes) > 1:
            raise BridgeError(f"the SGLang servers serve {sorted(dtypes)}: start all with the same --dtype")
        (self.served_dtype,) = dtypes
        self._manifest = manifest_of(shapes_of(trained.model), self.served_dtype, infos[0][1].model_path)
        self._buckets = self._manifest.buckets(mode.bucket_bytes(backend))
        self._source = trained.source(self._manifest)
        self._ranks = sum(info.tp_size for info, _ in infos)
        with ExitStack() as undo:
            undo.callback(self.close)
            for at, (info, _) in zip(config.vllm_servers, infos, strict=True):
                admin = SglangClient(*at, admin_key, config.bridge_timeout_s)
                self._links.append(SglangLink(admin, info.tp_size, rendezvous, backend))
            undo.pop_all()
        log.info("[Bridge] ✓ All ranks synchronized and ready")

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        update()
        updated = time.perf_counter()
        log.info(
            "[Bridge] Pausing %d SGLang server(s) and sending policy version %d: %.1f MB in %d buckets, at most %.0f s"
            " per bucket",
            len(self._links),
            policy_version,
            self._manifest.nbytes / 1e6,
            len(self._buckets),
            self._rendezvous.timeout_s,
        )
        self._order("/pause_generation", UNCHANGED, {"mode": "retract"})
        paused = time.perf_counter()
        self._each("/begin_weight_update", UNCHANGED, SglangLink.begin)
        if self._reset and not self._synced:
            self._order("/weights_checker", "with random weights", {"action": "reset_tensors"})
        self._send_all()
        self._order("/end_weight_update", "with new weights that are not finished")
        applied = time.perf_counter()
        version = {"new_version": str(policy_version), "abort_all_requests": False}
        self._order("/update_weight_version", "with new weights under the previous version", version)
        self._order("/continue_generation", f"with policy version {policy_version}")
        self._synced = True
        stall_s = time.perf_counter() - updated
        log.info(
            "[Bridge] Policy version %d is served: stall %.3f s, of which apply %.3f s",
            policy_version,
            stall_s,
            applied - paused,
        )
        return SyncReport(
            policy_version=policy_version,
            stall_s=stall_s,
            transfer_s=0.0,  # nothing travels while generation continues
            apply_s=applied - paused,
            bytes_moved=self._manifest.nbytes * self._ranks,
            servers=len(self._links),
        )

    def parity_probe(self) -> float:
        return max(parity(self._trained, server) for server in self._servers)

    def check(self) -> None:
        """SGLang holds no session: a server that is gone is seen at the next sync."""

    def close(self) -> None:
        self._threads.close()
        for link in self._links:
            link.close()
        self._links.clear()
        self._rendezvous.close()

    def _send_all(self) -> None:
        arrived, buckets = 0, self._buckets
        try:
            with closing(self._source.stream(buckets)) as stream:
                for bucket, packed in zip(buckets, stream, strict=True):
                    send = partial(SglangLink.send, bucket=bucket, packed=packed, last=bucket is buckets[-1])
                    state = f"with {arrived} of {len(buckets)} buckets of new weights, perhaps with a part of the next"
                    self._each("/update_weights_from_distributed", state, send)
                    arrived += 1
        finally:
            if arrived < len(buckets):  # also where the trainer's own ranks failed
                urls = ", ".join(link.admin.url for link in self._links)
                log.error("[Bridge] Left paused with weights of two policies: %s. %s", urls, REMEDY)

    def _order(self, path: str, state: str, body: object = None) -> None:
        self._each(path, state, lambda link: link.admin.order(path, body))

    def _each(self, step: str, state: str, act: Callable[[SglangLink], None]) -> None:
        """Do one step on every server at once. Raises BridgeError, after which no further step is taken on any."""
        outcomes = self._threads.at_once(act, self._links)
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            urls = ", ".join(link.admin.url for link in self._links)
            raise BridgeError(
                f"{step} failed: {'; '.join(map(str, failed))}. Paused {state}, unless it is gone: {urls}. {REMEDY}"
            ) from failed[0]


def check_server(url: str, info: ServerInfo, model: ModelInfo, model_type: str) -> None:
    """Raise BridgeError for a server that cannot take the trainer's weights."""
    log.info("SGLang %s at %s is ready: model %s, TP=%d", info.version, url, model.model_path, info.tp_size)
    if info.version != TESTED:
        log.warning("[Bridge] %s runs SGLang %s; this bridge was tested against %s", url, info.version, TESTED)
    if info.dp_size > 1 or info.pp_size > 1:
        raise BridgeError(
            f"{url} runs SGLang with dp_size {info.dp_size} and pp_size {info.pp_size}, which take no weights by"
            " broadcast: start one server per replica, with --tp-size alone"
        )
    if model.model_type not in (None, model_type):
        raise BridgeError(
            f"{url} serves a {model.model_type} model, the trainer trains a {model_type} one: use one model"
        )


def dtype_of(name: str) -> str:
    """A key of DTYPE_BYTES. Raises BridgeError for what the server alone knows."""
    dtype = {"half": "float16", "float": "float32"}.get(name, name)
    if dtype not in DTYPE_BYTES:
        raise BridgeError(
            f"SGLang runs with --dtype {name}: start it with --dtype bfloat16, float16 or float32, to"
            " which the trainer casts"
        )
    return dtype


def manifest_of(shapes: dict[str, tuple[int, ...]], dtype: str, model: str) -> Manifest:
    """The trainer's tensors as they travel: in its own order, without gaps, as SGLang's FlattenedTensorBucket lays them
    out. Raises BridgeError for a mixture of experts.
    """
    if stacked := next((name for name in shapes if ".experts." in name), None):
        raise BridgeError(
            f"mode sglang does not feed mixtures of experts: transformers stacks them ({stacked}), and SGLang"
            " loads them one by one; choose a mode of vLLM"
        )
    tensors = tuple(lay_out([("", [(name, shape, dtype) for name, shape in shapes.items()])]))
    return Manifest(model, 1, tensors[-1].offset + tensors[-1].nbytes, tensors)
