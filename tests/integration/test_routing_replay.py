"""Routed experts on real vLLM (CPU): they are those of a transformers forward, however vLLM computed a token, and to
replay them brings the trainer's log-probabilities closer to the sampler's.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from atroposlib.routing import unpack
from atroposlib.wire.batching import GroupRequirements, ScoredData
from example_trainer.data.batching import make_batch
from example_trainer.data.packing import micro_batches
from example_trainer.data.routing_replay import routing_of, shape_of
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import values
from example_trainer.model.loading import load_model
from example_trainer.model.policy import Policy
from example_trainer.settings.loss import LossSettings
from tests.integration.conftest import Server, save_tiny_model, start_server, stop_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

CPU = torch.device("cpu")
VOCABULARY = 512
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=4,
    mlp_only_layers=[1],
    norm_topk_prob=True,
    initializer_range=0.2,
    max_position_embeddings=512,
)
CONFIG = Qwen3MoeConfig(**SHAPE)
# prompts are read in parts, and ten answers do not fit in the KV cache at once
SMALL_STEPS = ("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "40")


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("moe"), CONFIG)


@pytest.fixture(scope="module")
def server(moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = start_server(
        moe_folder,
        tmp_path_factory.mktemp("vllm"),
        "--enable-return-routed-experts",
        *SMALL_STEPS,
        bridge=False,
        deadline_s=600,
    )
    yield started
    stop_server(started)


def counted(server: Server, name: str) -> float:
    """A counter of vLLM's."""
    lines = server.request("GET", "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))


def sample(server: Server, prompt: list[int], n: int, max_tokens: int) -> list[dict[str, Any]]:
    reply = server.generate(prompt, n=n, max_tokens=max_tokens, logprobs=0, temperature=1.0, ignore_eos=True)
    return [
        {
            "tokens": prompt + ids,
            "masks": [-100] * len(prompt) + ids,
            "inference_logprobs": [1.0] * len(prompt) + [next(iter(each[0].values())) for each in logprobs],
            "routed_experts": routed,
        }
        for ids, logprobs, routed in zip(reply["token_ids"], reply["logprobs"], reply["routed_experts"], strict=True)
    ]


@pytest.fixture(scope="module")
def group(server: Server) -> ScoredData:
    """Sequences that vLLM read in parts, out of its prefix cache, beside others, and again after it preempted them."""
    generator = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(length)]

    long = prompt(200)
    found = sample(server, long, 1, 30)
    hits = counted(server, "prefix_cache_hits_total")
    found += sample(server, long[:150] + prompt(20), 2, 30) + sample(server, long, 1, 30)
    assert counted(server, "prefix_cache_hits_total") >= hits + 2 * 128
    prompts = [prompt(generator.randrange(20, 150)) for _ in range(10)]
    with ThreadPoolExecutor(10) as pool:
        for sampled in pool.map(lambda each: sample(server, each, 1, 180), prompts):
            found += sampled
    assert counted(server, "num_preemptions_total") > 0
    lists: dict[str, Any] = {name: [each[name] for each in found] for name in found[0]}
    return ScoredData(scores=[float(index % 2) for index in range(len(found))], **lists)


def measured(folder: Path, group: ScoredData, replay: str, dtype: torch.dtype) -> dict[str, float | None]:
    """What the trainer measures of the group, its weights rounded to `dtype`."""
    model = load_model(str(folder), CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    policy = Policy(model)
    policy.routing = routing_of(model, replay)
    needs = GroupRequirements(
        vocab_size=VOCABULARY, trainable_only=True, routing=shape_of(model), routing_required=True
    )
    batch = make_batch([group], seq_len=512, policy_version=0, needs=needs)
    assert batch.rejected == {}
    return values(batch_gradients(policy, micro_batches(batch.sequences, 1024, CPU), LossSettings()))


def test_vllm_returns_the_experts_of_every_token_that_it_read(group: ScoredData, moe_folder: Path) -> None:
    assert isinstance(group.routed_experts, list)
    for tokens, text in zip(group.tokens, group.routed_experts, strict=True):
        experts = unpack(text)
        assert experts.shape == (len(tokens) - 1, CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)
        assert not experts[:, 1].any()  # the dense layer
    alike = measured(moe_folder, group, "off", torch.float32)
    print("float32:", alike)
    # sums in another order may flip an expert where two scores are almost equal
    assert alike["routing_disagreement"] is not None
    assert alike["routing_disagreement"] <= 1e-3


def test_replay_brings_a_trainer_that_routes_otherwise_closer_to_the_sampler(
    group: ScoredData, moe_folder: Path
) -> None:
    free = measured(moe_folder, group, "off", torch.bfloat16)
    replayed = measured(moe_folder, group, "auto", torch.bfloat16)
    print("bfloat16, free:", free, "replayed:", replayed)
    assert free["routing_disagreement"]
    assert replayed["routing_disagreement"]
    for name in ("logprob_diff_mean", "sampler_kl"):
        assert replayed[name] < free[name], name  # type: ignore[operator]
