"""SGLang's own HTTP server, tokenizer manager and weight updaters around a Hugging Face model, in SGLang's environment:

    .venv-sglang/bin/python -m tests.integration.sglang_child MODEL PORT API_KEY ADMIN_API_KEY FAULT

From SGLang: routes, keys, request types, pause and continue, the manager's and the updater's states, the process group,
flattened buckets, the weight checker, versions of tokens. Stand-ins: the sockets between its processes, the scheduler's
loop (one request, one token at a time, greedily), the model with its `load_weights`, and torchvision, whose CPU build
it does not need. While the file FAULT exists, `load_weights` fails in mid-load.
"""

import asyncio
import importlib.abc
import importlib.machinery
import itertools
import queue
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.image_utils  # noqa: F401  # before torchvision seems to be there
import uvicorn
from transformers import AutoModelForCausalLM


class AnyName(type):
    """Of classes that have every attribute."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class AnyModule(types.ModuleType):
    """Has every class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports torchvision as a package that has everything."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        mine = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.insert(0, StandIns())

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.entrypoints import http_server  # noqa: E402
from sglang.srt.managers import io_struct as io  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from sglang.srt.managers.tp_worker import BaseTpWorker  # noqa: E402
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils.aio_rwlock import RWLock  # noqa: E402
from sglang.srt.utils.auth import add_api_key_middleware  # noqa: E402
from sglang.srt.utils.weight_checker import WeightChecker  # noqa: E402
from sglang.srt.utils.weight_versions import add_weight_versions_to_meta_info, compute_weight_version_spans  # noqa: E402
from sglang.utils import TypeBasedDispatcher  # noqa: E402

TOKEN_S = 0.05  # of a stand-in forward pass, so that a sync falls into the middle of a request


class Served(torch.nn.Module):
    """The model as a SGLang model is to its weight updater."""

    def __init__(self, source: str, fault: Path) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self._fault = fault

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.model.named_parameters())
        for loaded, (name, tensor) in enumerate(weights):
            if self._fault.exists() and loaded == 2:
                raise KeyError(f"{name} (a fault of the test)")
            parameters[name].data.copy_(tensor)

    def scores(self, ids: list[int]) -> torch.Tensor:
        """Log-probabilities after each token, [tokens, vocabulary]."""
        with torch.no_grad():
            logprobs: torch.Tensor = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return logprobs


class Request:
    """A request as far as weight versions look at it. `done` is called with the reply."""

    def __init__(self, asked: Any, done: Any) -> None:
        self.prompt: list[int] = asked.input_ids
        self.limit = asked.sampling_params["max_new_tokens"]
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.weight_version_events: list[Any] = []
        self.input_logprobs = asked.logprob_start_len == 0
        self.done = done


class Worker(BaseTpWorker):  # type: ignore[misc]  # of a package that the project lacks
    """A TP rank whose model runner has only its weight updater."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def model_runner(self) -> Any:
        return self._runner

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("target", self._runner)]

    def forward_batch_generation(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError


class SchedulerLoop:
    """The scheduler: orders first, then one token of each request that is not paused."""

    def __init__(self, model: Served) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self.reply: Any = None
        self.waiting_queue: list[Request] = []
        self.running: list[Request] = []
        self.chunked_req = self.hisparse_coordinator = None
        self.paused = False
        self.flushed = 0
        self._model = model
        known = {
            "tp_rank": 0,
            "device": "cpu",
            "gpu_id": 0,
            "model_config": None,
            "custom_weight_loaders": {},
            "get_model": lambda: model,
            "update_model_fields": None,
            "recapture_cuda_graph": None,
            "get_model_runner": None,
        }
        checker = WeightChecker(get_model=lambda: model)
        runner = types.SimpleNamespace(
            weight_updater=WeightUpdater(**known), check_weights=lambda **named: checker.handle(**named)
        )
        self.weights = SchedulerWeightUpdaterManager(
            tp_worker=Worker(runner),
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self._flush_cache,
            is_fully_idle=lambda: not self.running,
            scheduler=self,
        )
        manager = self.weights
        self._acts = {
            io.InitWeightsUpdateGroupReqInput: manager.init_weights_update_group,
            io.DestroyWeightsUpdateGroupReqInput: manager.destroy_weights_update_group,
            io.BeginWeightUpdateReqInput: manager.begin_weight_update,
            io.UpdateWeightsFromDistributedReqInput: manager.update_weights_from_distributed,
            io.EndWeightUpdateReqInput: manager.end_weight_update,
            io.CheckWeightsReqInput: manager.check_weights,
            io.UpdateWeightVersionReqInput: lambda order: Scheduler.handle_update_weight_version(self, order),
            io.GetInternalStateReq: lambda order: io.GetInternalStateReqOutput(internal_state={}),
            io.PauseGenerationReqInput: self._pause,
            io.ContinueGenerationReqInput: self._continue,
            Request: self.waiting_queue.append,
        }

    def record_weight_version_change(self, new_version: str | None) -> None:
        Scheduler.record_weight_version_change(self, new_version)

    def collect_inflight_reqs(self) -> set[Request]:
        return set(self.running)

    def run(self) -> None:
        with torch.inference_mode():
            while True:
                try:
                    order = self.inbox.get(timeout=TOKEN_S)
                except queue.Empty:
                    if not self.paused:
                        self._step()
                    continue
                if (answer := self._acts[type(order)](order)) is not None:
                    self.reply(answer)

    def _pause(self, order: Any) -> None:
        assert order.mode == "retract"
        self.paused = True
        self.waiting_queue[:0] = self.running
        self.running = []

    def _continue(self, order: Any) -> None:
        self.paused = False

    def _flush_cache(self, empty_cache: bool = True) -> bool:
        self.flushed += not self.running
        return not self.running

    def _step(self) -> None:
        self.running += self.waiting_queue
        self.waiting_queue.clear()
        for request in tuple(self.running):
            logprob, token = self._model.scores(request.prompt + request.output_ids)[-1].max(-1)
            request.output_ids.append(int(token))
            request.logprobs.append(float(logprob))
            if len(request.output_ids) == request.limit:
                self.running.remove(request)
                request.done(self._answer(request))

    def _answer(self, request: Request) -> dict[str, Any]:
        count = len(request.output_ids)
        info: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": [[p, t, None] for p, t in zip(request.logprobs, request.output_ids, strict=True)],
        }
        if request.input_logprobs:
            scores, ids = self._model.scores(request.prompt), request.prompt
            rest = [[float(scores[at, token]), token, None] for at, token in enumerate(ids[1:])]
            info["input_token_logprobs"] = [[None, ids[0], None], *rest]
        version = runtime_context.get_serving().weight_version
        spans = compute_weight_version_spans(request.weight_version_events, version, count)
        add_weight_versions_to_meta_info(info, spans, count)
        return {"text": "", "output_ids": request.output_ids, "meta_info": info}


class Manager(TokenizerManager):  # type: ignore[misc]  # as above
    """SGLang's tokenizer manager, with a queue for its sockets and without a tokenizer."""

    def __init__(self, args: ServerArgs, scheduler: SchedulerLoop, source: str) -> None:
        self._engine_state_changed_callback = None
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = RWLock()
        self.mm_processor = None
        self.server_args, self.model_path, self.served_model_name = args, source, source
        self.startup_time = time.time()
        self.gracefully_exit = False
        self.server_status = http_server.ServerStatus.Up
        self.model_config = types.SimpleNamespace(
            is_image_understandable_model=False,
            is_audio_understandable_model=False,
            hf_config=types.SimpleNamespace(model_type="llama", architectures=["LlamaForCausalLM"]),
        )
        self.is_generation = True
        self._scheduler = scheduler
        self._result_dispatcher = TypeBasedDispatcher([])
        self.init_communicators()

    def auto_create_handle_loop(self) -> None:
        loop = asyncio.get_running_loop()
        self._scheduler.reply = lambda answer: loop.call_soon_threadsafe(self._result_dispatcher, answer)

    def _dispatch_to_scheduler(self, order: Any) -> None:
        self._scheduler.inbox.put(order)

    async def _async_dispatch_to_scheduler(self, order: Any) -> None:
        self._scheduler.inbox.put(order)

    async def generate_request(self, asked: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        async with self.is_pause_cond:
            await self.is_pause_cond.wait_for(lambda: not self.is_pause)
        loop, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        self._dispatch_to_scheduler(Request(asked, lambda reply: loop.call_soon_threadsafe(answer.set_result, reply)))
        yield await answer


def main(source: str, port: str, api_key: str, admin_api_key: str, fault: str) -> None:
    args = ServerArgs(
        model_path=source,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        api_key=api_key,
        admin_api_key=admin_api_key,
    )
    runtime_context.publish(args, role="main", ranks=runtime_context.SpawnRanks(world_rank=0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    runtime_context.get_parallel().override_permanently(tp_group=types.SimpleNamespace(cpu_group=dist.group.WORLD))
    scheduler = SchedulerLoop(Served(source, Path(fault)))
    threading.Thread(target=scheduler.run, daemon=True).start()
    manager = Manager(args, scheduler, source)
    http_server.set_global_state(http_server._GlobalState(manager, None, {}))
    add_api_key_middleware(http_server.app, api_key=api_key, admin_api_key=admin_api_key)
    uvicorn.run(http_server.app, host="127.0.0.1", port=int(port), lifespan="off", log_level="warning")


if __name__ == "__main__":
    main(*itertools.islice(sys.argv, 1, None))
