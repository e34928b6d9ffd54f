"""An SGLang server as the bridge sees it, without SGLang: its routes, its keys, its states, and ranks over Gloo.

It takes weights between begin and end alone, refuses a second begin, and generates nothing while it is paused.
"""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _cleanup_process_group_global_state, _new_process_group_helper
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import serving
from tests.serving import Asked, ThreadedServer
from vllm_patching import transport

OPEN, ADMIN = "sk-open", "sk-admin"
JSON = {"Content-Type": "application/json"}
Reply = tuple[int, dict[str, Any]]
DONE: Reply = (200, {"success": True, "message": "Success"})


class FakeSglangServer:
    """Serves the model of `source`. `fails` is a route that is refused once, `dies` one that never answers again."""

    def __init__(self, source: str, tp_size: int = 1, dtype: str = "float32", **info: Any) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source)
        self.info = {"version": "0.5.23", "dtype": dtype, "tp_size": tp_size, "dp_size": 1, "pp_size": 1} | info
        self.model_info = {"model_path": source, "model_type": "llama"}
        self.version: str = "default"
        self.paused = self.updating = False
        self.fails: str | None = None
        self.dies: str | None = None
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.ignored: set[str] = set()  # names that its load_weights passes over
        self._groups: list[Any] = []
        self._http = ThreadedServer(self._heard)
        self.port, self.stop = self._http.port, self._http.close

    def _heard(self, asked: Asked) -> serving.Reply | None:
        if asked.path == self.dies:
            return None
        key = OPEN if asked.path in ("/server_info", "/model_info", "/generate") else ADMIN
        if asked.headers.get("Authorization") != f"Bearer {key}":
            return serving.Reply(401, b'{"error": "Unauthorized"}', JSON)
        status, reply = self.answer(asked.path, json.loads(asked.body or b"{}"))
        return serving.Reply(status, json.dumps(reply).encode(), JSON)

    @property
    def taken(self) -> list[str]:
        """The routes of the orders, a bucket after the other as one."""
        routes = [path for path, _ in self.orders]
        return [path for at, path in enumerate(routes) if at == 0 or path != routes[at - 1]]

    def answer(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/server_info":
            return 200, self.info
        if path == "/model_info":
            return 200, self.model_info
        if path == "/generate":
            return self._generate(body)
        self.orders.append((path, body))
        if path == self.fails:
            self.fails = None
            return 400, {"success": False, "message": f"{path} broken for the test"}
        act = getattr(self, "_" + path.strip("/"))
        reply: Reply = act(body)
        return reply

    def _pause_generation(self, body: dict[str, Any]) -> Reply:
        self.paused = True
        return DONE

    def _continue_generation(self, body: dict[str, Any]) -> Reply:
        self.paused = False
        return DONE

    def _begin_weight_update(self, body: dict[str, Any]) -> Reply:
        if self.updating:
            return 400, {"success": False, "message": "a weight-update session is already open; call end first"}
        self.updating = True
        return DONE

    def _end_weight_update(self, body: dict[str, Any]) -> Reply:
        was, self.updating = self.updating, False
        return DONE if was else (400, {"success": False, "message": "no weight-update session is open"})

    def _update_weight_version(self, body: dict[str, Any]) -> Reply:
        self.version = body["new_version"]
        return DONE

    def _weights_checker(self, body: dict[str, Any]) -> Reply:
        for parameter in self.model.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(7))
        return DONE

    def _init_weights_update_group(self, body: dict[str, Any]) -> Reply:
        """The first rank joins by what SGLang's init_custom_process_group calls, the others by the same keys."""
        name, size, at = body["group_name"], body["world_size"], ("127.0.0.1", body["master_port"])
        stores = [dist.PrefixStore(name, transport.join_store(*at, timeout_s=5)) for _ in range(1, size)]

        def first() -> None:
            timeout = timedelta(seconds=5)
            group, _ = _new_process_group_helper(
                size, body["rank_offset"], [], Backend(body["backend"]), stores[0], group_name=name, timeout=timeout
            )
            self._groups.insert(0, group._get_backend(torch.device("cpu")))
            _cleanup_process_group_global_state(group)  # a profiler of another test would look for its ranks

        def other(rank: int) -> None:
            store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", stores[rank - 1]))
            self._groups.append(transport.gloo_group(store, rank, size, 5, "127.0.0.1"))

        self._groups.clear()
        _at_once([first, *(lambda rank=rank: other(rank) for rank in range(2, size))])
        return DONE

    def _destroy_weights_update_group(self, body: dict[str, Any]) -> Reply:
        self._groups.clear()
        return DONE

    def _update_weights_from_distributed(self, body: dict[str, Any]) -> Reply:
        if not self.updating:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        sizes = [
            math.prod(shape) * getattr(torch, dtype).itemsize
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        received = [torch.empty(sum(sizes), dtype=torch.uint8) for _ in self._groups]
        waits = [g.broadcast([t], transport.from_rank_0()) for g, t in zip(self._groups, received, strict=True)]
        try:
            for work in waits:
                work.wait()
        except RuntimeError as error:
            return 400, {"success": False, "message": f"Failed to receive weights: {error}"}
        parameters = dict(self.model.named_parameters())
        for name, dtype, part in zip(body["names"], body["dtypes"], received[-1].split(sizes), strict=True):
            if name not in self.ignored:
                parameters[name].data.copy_(part.view(getattr(torch, dtype)).view(parameters[name].shape))
        return DONE

    def _generate(self, body: dict[str, Any]) -> Reply:
        if self.paused:
            return 503, {"error": {"message": "paused: SGLang would wait here"}}
        ids = body["input_ids"]
        with torch.no_grad():
            scores = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        own = [[None, ids[0], None]] + [[scores[at, token].item(), token, None] for at, token in enumerate(ids[1:])]
        return 200, {"text": "", "meta_info": {"input_token_logprobs": own, "weight_version": self.version}}


def _at_once(acts: list[Any]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


@contextmanager
def serving_sglang(source: str, *tp_sizes: int) -> Iterator[list[FakeSglangServer]]:
    """One server per tensor-parallel size."""
    servers = [FakeSglangServer(source, tp_size) for tp_size in tp_sizes]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
