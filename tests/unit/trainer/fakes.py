"""What trainer tests stand on: tiny random models, made-up batches, a batching API in a thread, a bridge that only
records.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from atroposlib.groups import Untrainable
from atroposlib.wire.batching import ScoredData
from example_trainer.bridges import BridgeError, Prepared, SyncReport, WeightBridge
from example_trainer.data.batching import Sequence as Tokens
from example_trainer.weights.written import TrainedModel
from tests.serving import Asked, Reply, ThreadedServer

VOCAB = 97
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}

ROUTED: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def random_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a Hugging Face model type."""
    torch.manual_seed(0)
    settings = SHAPE | {"initializer_range": 0.3, "pad_token_id": 0} | changes
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    return model


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a family's architecture, with weights large enough that its distributions are not flat."""
    torch.manual_seed(seed)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[family]
    settings = SHAPE | {"tie_word_embeddings": False, "initializer_range": 0.3} | EXPERTS.get(family, {}) | changes
    if family == "qwen2":
        settings.pop("head_dim")
    model: PreTrainedModel = model_class(config_class(**settings))
    if (padding := settings.get("pad_token_id")) is not None:  # transformers starts that row at 0
        with torch.no_grad():
            model.get_input_embeddings().get_parameter("weight")[padding].normal_(std=settings["initializer_range"])
    return model


def model_folder(path: Path, **changes: Any) -> str:
    """A tiny model saved as a Hugging Face directory."""
    tiny_model(**changes).save_pretrained(path)
    return str(path)


def item(scores: list[float], *, seed: int = 0, prompt: int = 4, longest: int = 12, **fields: Any) -> dict[str, Any]:
    """A batch item as the API sends it: one prompt, one random answer a score, all 14 keys present."""
    generator = np.random.default_rng(seed)
    question = generator.integers(1, VOCAB, prompt).tolist()
    group: dict[str, Any] = dict.fromkeys(
        (
            "advantages",
            "ref_logprobs",
            "messages",
            "generation_params",
            "overrides",
            "group_overrides",
            "images",
            "env_id",
            "distill_token_ids",
            "distill_logprobs",
        )
    )
    group |= {"tokens": [], "masks": [], "scores": list(scores), "inference_logprobs": []}
    for _ in scores:
        answer = generator.integers(1, VOCAB, int(generator.integers(1, longest + 1))).tolist()
        group["tokens"].append(question + answer)
        group["masks"].append([-100] * prompt + answer)
        group["inference_logprobs"].append([1.0] * prompt + (-generator.uniform(0.05, 6.0, len(answer))).tolist())
    return group | fields


def with_made_up_teacher(group: dict[str, Any], top_k: int) -> dict[str, Any]:
    """The group with a teacher that names each token, and others beside it, with probabilities of its own."""
    generator = np.random.default_rng(len(group["tokens"][0]))

    def names(token: int) -> tuple[list[int], list[float]]:
        ids = [(token + 5 * each) % VOCAB for each in range(top_k + 1)]
        return ids, np.log(generator.dirichlet(np.ones(top_k + 2))[:-1]).astype(np.float32).tolist()

    said = [[names(token) for token in tokens] for tokens in group["tokens"]]
    return group | {
        "distill_token_ids": [[ids for ids, _ in sequence] for sequence in said],
        "distill_logprobs": [[logprobs for _, logprobs in sequence] for sequence in said],
    }


def made_up_answers(count: int, sides: int, longest: int = 9) -> list[tuple[Tokens, ...]]:
    """Offline examples of `sides` answers each, behind a prompt that they share."""
    generator = np.random.default_rng(count)
    found = []
    for _ in range(count):
        prompt = generator.integers(1, VOCAB, 4).tolist()
        lengths = generator.integers(1, longest + 1, sides)
        answers = [generator.integers(1, VOCAB, length).tolist() for length in lengths]
        found.append(tuple(answer_of([*prompt, *answer], len(prompt)) for answer in answers))
    return found


def answer_of(tokens: list[int], begins: int) -> Tokens:
    """A sequence that no sampler knows, trained from the place where its answer begins."""
    return Tokens(
        tokens=np.array(tokens),
        trained=np.arange(len(tokens)) >= begins,
        sampler_logprobs=None,
        advantages=np.ones(len(tokens), np.float32),
        reference_logprobs=None,
        temperature=1.0,
    )


def as_records(items: Sequence[Any]) -> list[ScoredData | Untrainable]:
    """A batch as the trainer's client reads it from JSON."""

    def read(each: Any) -> ScoredData | Untrainable:
        try:
            return msgspec.convert(each, ScoredData)
        except msgspec.ValidationError as error:
            return Untrainable(str(error))

    return [read(each) for each in items]


class RecordingBridge(WeightBridge):
    """A bridge without a peer: binds parameters to one flat buffer as the real ones do, and notes what it was asked.

    A call of it is what `grpo.run` takes to prepare a bridge.
    """

    served_dtype = "float32"

    def __init__(self, parity: float = 0.0, fail_at: int | None = None, serves_every: int = 1) -> None:
        self.versions: list[int] = []
        self.probes = 0
        self.closed = False
        self._parity = parity
        self._fail_at = fail_at
        self._serves_every = serves_every
        self.lost = False
        self.differing: list[str] | None = []  # tensors that vLLM has of its own

    def __call__(self, source: str, device: torch.device) -> Prepared:
        return Prepared(self.connect, self.close)

    def connect(self, trained: TrainedModel) -> WeightBridge:
        self.trained = trained
        parameters = [parameter for parameter in trained.model.parameters() if parameter.requires_grad]
        flat = torch.empty(sum(parameter.numel() for parameter in parameters))
        start = 0
        for parameter in parameters:
            view = flat[start : start + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            start += parameter.numel()
        return self

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        if policy_version == self._fail_at:
            raise KeyboardInterrupt
        update()
        self.versions.append(policy_version)
        if policy_version % self._serves_every == 0 or len(self.versions) == 1 or policy_version == self.last_version:
            self._served = policy_version
        return SyncReport(self._served, stall_s=0.001, transfer_s=0.002, apply_s=0.0005, bytes_moved=10)

    def differing_tensors(self, policy_version: int) -> list[str] | None:
        assert policy_version == self._served
        return self.differing

    def parity_probe(self) -> float:
        self.probes += 1
        return self._parity

    def check(self) -> None:
        if self.lost:
            raise BridgeError("vLLM is lost")

    def close(self) -> None:
        self.closed = True


class FakeApi:
    """The batching API as far as a trainer sees it. `batches(n)` gives the n-th batch of this server's life, from 0."""

    def __init__(self, batches: Callable[[int], list[dict[str, Any]] | None]) -> None:
        self.batches = batches
        self.delivered = 0
        self.registrations: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.evaluations: dict[int, float] = {}
        self.questions = 0  # of each evaluation; 0 where it does not count them
        self.final: dict[int, float] = {}  # accuracy with further questions, 256 in all
        self.pending: dict[int, int] = {}  # policy version -> how often it is still pending when asked
        self.forget_trainer = False
        self.batch_invariant = True  # what it answers as a vLLM server

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        if (method, path) == ("POST", "/register"):
            self.registrations.append(body)
            self.forget_trainer = False
            return {"uuid": 1}
        if (method, path) == ("POST", "/trainer-step"):
            assert body.pop("trainer") == 1, "a step is reported by the trainer that registered"
            self.steps.append(body)
            return {"status": "success"}
        if path == "/v1/bridge/status":
            return {"model": "m", "policy_version": 0, "batch_invariant": self.batch_invariant, "tp_size": 1}
        if path == "/batch":
            return self._batch()
        if path == "/evaluations":
            return self._evaluation(int(query["policy_version"][0]))
        return {"batch_size": -1, "max_token_len": -1}

    def _batch(self) -> dict[str, Any]:
        if self.forget_trainer or not self.registrations:
            return {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
        batch = self.batches(self.delivered)
        self.delivered += batch is not None
        return {"batch": batch}

    def _evaluation(self, version: int) -> dict[str, Any]:
        if self.pending.get(version, 0) > 0:
            self.pending[version] -= 1
            return {"results": [], "pending": ["gsm8k"]}
        accuracy = self.evaluations.get(version)
        if accuracy is None:
            return {"results": [], "pending": []}
        metrics = {"total": float(self.questions)} if self.questions else {}
        if version in self.final:
            metrics |= {"final_accuracy": self.final[version], "final_total": 256.0}
        result = {"env_id": 0, "env_name": "gsm8k", "policy_version": version, "accuracy": accuracy, "metrics": metrics}
        return {"results": [result], "pending": []}


@contextlib.contextmanager
def serve(api: FakeApi, port: int = 0) -> Iterator[str]:
    """Run the API in a thread on loopback; its URL."""

    def answer(asked: Asked) -> Reply:
        split = urlsplit(asked.path)
        reply = api.answer(asked.method, split.path, parse_qs(split.query), json.loads(asked.body or b"{}"))
        return Reply(body=json.dumps(reply).encode())

    with ThreadedServer(answer, port) as server:
        yield server.url


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient that a backward pass left."""
    assert parameter.grad is not None
    return parameter.grad
