"""A vLLM server as the broadcast bridge sees it, without vLLM: the HTTP routes, and one updater thread per rank on real
Gloo groups.
"""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from atroposlib.wire.bridge import GOODBYE, PROTOCOL, Announced, BroadcastOffer, Manifest, ack_key, go_key, lay_out
from atroposlib.wire.senders import expect_layouts, group_name, sender_ack_key
from tests.serving import Asked, Reply, ThreadedServer
from vllm_patching import delta, transport
from vllm_patching.memory.digest import digest
from vllm_patching.several_senders import SeveralSenders


class FakeVllmServer:
    """Serves the model of `source` at 127.0.0.1:`port`. `fail` names what goes wrong: "transfer" (silent), "commit",
    "heartbeat".
    """

    def __init__(self, source: str, tp_size: int = 1, dtype: str = "float32") -> None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source)
        self._model = model
        tensors = tuple(lay_out([(name, [(name, tuple(p.shape), dtype)]) for name, p in model.named_parameters()]))
        self.manifest = Manifest(source, tp_size, tensors[-1].offset + tensors[-1].nbytes, tensors)
        self.version = 0
        self.session: str | None = None
        self.fenced: str | None = None
        self.fail: str | None = None
        self.stall_s = 0.01
        self.sessions = 0
        self.batch_invariant = False
        self.protocol = PROTOCOL
        self.senders = 0  # of the session that is open
        self._staged: dict[int, torch.Tensor] = {}
        self._live: dict[int, torch.Tensor] = {}
        self.bases: list[int | None] = []  # of the transfers that came
        self._http = ThreadedServer(self._heard)
        self.port = self._http.port

    def stop(self) -> None:
        """As if the process were killed, but for the thread that waits in a group."""
        self.session = None
        self._http.close()

    def _heard(self, asked: Asked) -> Reply:
        status, reply = self.answer(asked.method, asked.path, json.loads(asked.body or b"{}"))
        return Reply(status, json.dumps(reply).encode())

    def answer(  # noqa: C901
        self, method: str, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        if path.endswith("/status"):
            workers = [{"rank": rank, "state": "joined", "error": None} for rank in range(self.manifest.tp_size)]
            return 200, {
                "enabled": True,
                "model": "m",
                "tp_size": self.manifest.tp_size,
                "protocol": self.protocol,
                "policy_version": self.version,
                "batch_invariant": self.batch_invariant,
                "workers": workers,
            }
        if path.endswith("/digest"):
            return 200, {"policy_version": self.version, "ranks": [self._digests()] * self.manifest.tp_size}
        if path.endswith("/manifest"):
            return 200, msgspec.to_builtins(self.manifest)
        if path.endswith("/session"):
            return self._open(msgspec.convert(body, BroadcastOffer))
        if path.endswith("/bridge/decode"):
            return (503, {"error": self.fenced}) if self.fenced else (200, self._decode(body))
        if path.endswith("/generate"):
            return (503, {"error": self.fenced}) if self.fenced else (200, self._generate(body))
        if (body.get("session") or path.split("/")[4]) != self.session:
            return 404, {"detail": "not the current session"}
        if path.endswith("/fence"):
            self.session, self.fenced = None, body["reason"]
        if path.endswith("/commit"):
            return self._commit(body["policy_version"])
        if path.endswith("/heartbeat") and self.fail == "heartbeat":
            return 500, {"detail": "heartbeat broken for the test"}
        if method == "DELETE":
            self.session = None
        return 200, {}

    def _digests(self) -> list[dict[str, Any]]:
        live = dict(self._model.named_parameters())
        return [
            {
                "name": tensor.name,
                "dim": 0,
                "start": 0,
                "length": tensor.shape[0],
                "digest": digest(live[tensor.name].to(getattr(torch, tensor.dtype))),
            }
            for tensor in self.manifest.tensors
        ]

    def _open(self, offer: BroadcastOffer) -> tuple[int, dict[str, Any]]:
        assert offer.manifest_digest == self.manifest.digest()
        assert offer.world_size == 1 + self.manifest.tp_size
        if offer.senders is not None:
            assert self.protocol == PROTOCOL
            expect_layouts(self.manifest, offer.bucket_bytes, offer.senders)
        self.senders = offer.senders.count if offer.senders else 1
        self.session = offer.session
        self.sessions += 1
        for rank in range(self.manifest.tp_size):
            threading.Thread(target=self._update, args=(offer, rank), daemon=True).start()
        return 200, {}

    def _update(self, offer: BroadcastOffer, rank: int) -> None:
        with contextlib.suppress(RuntimeError):  # the trainer is gone
            self._receive(offer, rank)

    def _receive(self, offer: BroadcastOffer, rank: int) -> None:
        store = transport.join_store(offer.address, offer.port, offer.timeout_s)
        count = offer.senders.count if offer.senders else 1
        names = [group_name(offer.session, each) for each in range(count)] if offer.senders else [offer.session]
        members = (rank + 1, offer.world_size, offer.timeout_s, "gloo", "127.0.0.1")
        groups = [transport.join_groups(store, name, *members) for name in names]
        several = SeveralSenders(offer.senders, groups) if offer.senders else None
        sequence = 0
        while self.session == offer.session:
            if not store.check([go_key(offer.session, sequence)]):
                time.sleep(0.005)
                continue
            while self.fail == "transfer":
                time.sleep(0.02)
            if self.session != offer.session:  # another one has begun meanwhile
                return
            found = store.get(go_key(offer.session, sequence))
            if found == GOODBYE.encode():
                return
            base = Announced.decoded(found).base
            self.bases.append(base)
            image = torch.empty(self.manifest.nbytes, dtype=torch.uint8) if base is None else self._live[rank].clone()
            for bucket in self.manifest.buckets(offer.bucket_bytes):
                buffer = image[bucket.start : bucket.end]
                if offer.delta:
                    delta.receive(groups[0], buffer, has_base=base is not None)
                else:
                    several.begin(bucket, buffer)() if several else groups[0].broadcast(buffer)
            self._staged[rank] = image
            for each in range(count if several else 0):
                store.set(sender_ack_key(offer.session, sequence, rank, each), "")
            store.set(ack_key(offer.session, sequence, rank), "1")
            sequence += 1

    @torch.no_grad()
    def _commit(self, version: int) -> tuple[int, dict[str, Any]]:
        if self.fail == "commit":
            return 500, {"detail": "commit broken for the test"}
        assert len(self._staged) == self.manifest.tp_size, "a commit came before every rank had staged"
        parameters = dict(self._model.named_parameters())
        for tensor in self.manifest.tensors:
            flat = self._staged[0][tensor.offset : tensor.offset + tensor.nbytes].view(getattr(torch, tensor.dtype))
            parameters[tensor.name].copy_(flat.view(tensor.shape))
        self._live = dict(self._staged)
        self._staged.clear()
        self.version, self.fenced = version, None
        return 200, {
            "policy_version": version,
            "stall_s": self.stall_s,
            "pause_s": 0.008,
            "apply_s": 0.001,
            "commit_s": 0.01,
        }

    @torch.no_grad()
    def _decode(self, body: dict[str, Any]) -> dict[str, Any]:
        answers, rows = [], []
        for prompt, steps in zip(body["prompts"], body["steps"], strict=True):
            tokens, of_prompt = list(prompt), []
            for step in range(body["answer_tokens"]):
                logits = self._model(input_ids=torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
                if step in steps:
                    of_prompt.append(base64.b64encode(logits.numpy().tobytes()).decode())
            answers.append(tokens[len(prompt) :])
            rows.append(of_prompt)
        cached = [0] * len(rows)
        return {"policy_version": self.version, "token_ids": answers, "logits": rows, "cached_tokens": cached}

    @torch.no_grad()
    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(body["prompt"]["prompt_token_ids"])
        logprobs = self._model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return {
            "prompt_logprobs": [None]
            + [{str(int(token)): float(value)} for token, value in zip(ids[1:], logprobs, strict=True)]
        }


@contextlib.contextmanager
def serving(*servers: FakeVllmServer) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.stop()
