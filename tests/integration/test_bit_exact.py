"""Bit-exactness on a real vLLM: batch m against n, decode against prefill, trainer against both, and steps of training
over each bridge.

One server with everything on that could change bits: chunked prefill, prefix caching, two threads, requests of many
lengths at once, and a cache too small for all of them. On a machine with a GPU the first tests run there
(scripts/gpu_check.sh), in bfloat16. Qwen3 with yarn's rotary embedding here; Qwen2 over two ranks, in bfloat16, with
a linear one where the server is restarted; Llama with llama3's where one file does it all.
"""

import contextlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from example_trainer.data.batching import Sequence
from example_trainer.data.packing import micro_batches
from example_trainer.exact.check import Comparison, summary
from example_trainer.exact.model import make_exact
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import values
from example_trainer.model.loading import load_model
from example_trainer.model.policy import Policy, token_logprobs
from example_trainer.optim.optimizer import make_optimizer, update
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.loss import LossSettings
from tests.integration.bridge_child import connect
from tests.integration.conftest import API_KEY, REPOSITORY, SHAPE, Server, save_tiny_model, start_server, stop_server
from tests.integration.namespaces import tied
from tests.serving import free_port
from vllm_patching.kv_cache.shared_rows import LEAST_ROWS

PROMPTS = 12
ANSWER = 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BLOCKS = 160  # of 32 tokens: one context of 4,200, not the thirty answers of 180 tokens to one prompt


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Qwen3, with its norms on queries and keys, weights large enough that sampling is not uniform, and scaled rotary
    angles.
    """
    config = Qwen3Config(
        **SHAPE | {"intermediate_size": 264, "head_dim": 32, "max_position_embeddings": 5000},
        tie_word_embeddings=True,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 5.0,
            "original_max_position_embeddings": 1000,
        },
    )
    folder = save_tiny_model(tmp_path_factory.mktemp("exact"), config)
    flags = ["--batch-invariant", "--max-num-batched-tokens", "512", "--max-num-seqs", "32", "--max-model-len", "5000"]
    flags += ["--num-gpu-blocks-override", str(BLOCKS)]
    server = start_server(folder, tmp_path_factory.mktemp("vllm_exact"), *flags)
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def trainer(server: Server) -> Any:
    model = load_model(server.model, DEVICE)
    make_exact(model, DTYPE)
    return model


def rotated(family: type[LlamaConfig] | type[Qwen2Config], folder: Path, **rope_parameters: Any) -> Path:
    config = family(
        **SHAPE,
        tie_word_embeddings=False,
        initializer_range=0.1,
        rope_parameters={"rope_theta": 10000.0, **rope_parameters},
    )
    return save_tiny_model(folder, config)


def prompt(index: int, longest: int = 300) -> list[int]:
    """Prompts of very different lengths; those of odd index share their first 64 tokens, which the prefix cache then
    holds.
    """
    chosen = random.Random(index)
    shared = list(range(100, 164)) if index % 2 else []
    return shared + [chosen.randrange(1000) for _ in range(chosen.choice([1, 7, 40, longest]))]


def answers(server: Server, tokens: list[int], **sampling: Any) -> list[Sequence]:
    settings = {"temperature": 1.0, "max_tokens": ANSWER, "logprobs": 0, "ignore_eos": True} | sampling
    reply = server.generate(tokens, **settings)
    truncation = (settings.get("top_p", 1.0), settings.get("top_k", 0))
    sequences = []
    for answer, entries in zip(reply["token_ids"], reply["logprobs"], strict=True):
        ids = np.array(tokens + answer)
        trained = np.arange(len(ids)) >= len(tokens)
        sampled = np.zeros(len(ids), dtype=np.float32)
        sampled[trained] = [next(iter(entry.values())) for (entry,) in entries]
        sequences.append(
            Sequence(ids, trained, sampled, trained.astype(np.float32), None, settings["temperature"], *truncation)
        )
    return sequences


def sample(server: Server, tokens: list[int], **sampling: Any) -> Sequence:
    (sequence,) = answers(server, tokens, **sampling)
    return sequence


def together(calls: Iterable[Callable[[], Sequence]]) -> list[Sequence]:
    with ThreadPoolExecutor(len(calls := list(calls))) as pool:
        return list(pool.map(lambda call: call(), calls))


def compare(model: Any, sequences: list[Sequence], budget: int, share: bool) -> Comparison:
    comparison = Comparison()
    for batch in micro_batches(sequences, budget, model.device, share=share):
        comparison.add(batch.targets, batch.sampler_logprobs, token_logprobs(Policy(model), batch, 8))
    return comparison


def assert_exact(model: Any, sequences: list[Sequence], budget: int = 700) -> None:
    tokens = sum(sequence.trained_tokens for sequence in sequences)
    for share in (False, True):  # half of the prompts have their first tokens in common
        comparison = compare(model, sequences, budget, share)
        assert summary(comparison.row()) == f"Bitwise identical: True · 0 / {tokens} tokens differ", comparison.table()


def logprobs_of(sequence: Sequence) -> Any:
    assert sequence.sampler_logprobs is not None
    return sequence.sampler_logprobs


def test_a_request_gets_the_same_tokens_and_bits_alone_and_in_a_batch(server: Server) -> None:
    batched = together([partial(sample, server, prompt(index), temperature=0) for index in range(PROMPTS)])
    for index in (0, 1, 2, 3):
        alone = sample(server, prompt(index), temperature=0)
        assert np.array_equal(alone.tokens, batched[index].tokens)
        assert np.array_equal(logprobs_of(alone), logprobs_of(batched[index]))


def test_prefill_scores_what_decoding_sampled_with_the_same_bits(server: Server) -> None:
    for sequence in together([partial(sample, server, prompt(index)) for index in range(PROMPTS)]):
        ids = sequence.tokens.tolist()
        scored = server.generate(ids, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        decoded = logprobs_of(sequence)[sequence.trained]
        prefilled = [scored[at][str(ids[at])] for at in np.flatnonzero(sequence.trained)]
        assert np.array_equal(np.array(prefilled, dtype=np.float32), decoded)


def test_answers_to_one_question_have_the_bits_of_each_alone(server: Server) -> None:
    """Their questions are computed once in one pass: a question without a whole block of the cache, and one with."""
    asked = [[*range(5, 5 + length)] for length in (20, 50)]
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda tokens: answers(server, tokens, n=6), asked))
    for sequence in [each for group in groups for each in group]:
        ids = sequence.tokens.tolist()
        scored = server.generate(ids, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        alone = [scored[at][str(ids[at])] for at in np.flatnonzero(sequence.trained)]
        assert np.array_equal(np.array(alone, dtype=np.float32), logprobs_of(sequence)[sequence.trained])


def test_answers_that_are_alike_until_they_part_are_exact(server: Server, trainer: Any) -> None:
    """Their rows are computed once per pass."""
    sequences = answers(server, prompt(2), n=24, temperature=0.05, seed=1)
    begun = [Counter(each.tokens[: len(prompt(2)) + length].tobytes() for each in sequences) for length in (4, ANSWER)]
    assert begun[0].most_common(1)[0][1] > LEAST_ROWS
    assert len(begun[1]) > 1
    assert_exact(trainer, sequences)


def test_the_trainer_computes_the_sampled_bits_however_it_packs(server: Server, trainer: Any) -> None:
    sequences = together([partial(sample, server, prompt(index)) for index in range(PROMPTS)])
    assert_exact(trainer, sequences)
    assert_exact(trainer, sequences[::-1], budget=60)


def test_temperatures_are_exact(server: Server, trainer: Any) -> None:
    assert_exact(
        trainer, together([partial(sample, server, prompt(i), temperature=0.5 + 0.1 * i) for i in range(PROMPTS)])
    )


@pytest.mark.rotating
def test_truncated_sampling_is_exact(server: Server, trainer: Any) -> None:
    truncations: list[dict[str, Any]] = [
        {"top_p": 0.7},
        {"top_k": 20},
        {"top_p": 0.9, "top_k": 50, "temperature": 0.8},
        {},
    ]
    assert_exact(trainer, together([partial(sample, server, prompt(i), **truncations[i % 4]) for i in range(PROMPTS)]))
    assert_exact(trainer, [sample(server, prompt(1), top_k=5), sample(server, prompt(3), top_p=0.5)])


@pytest.mark.rotating
def test_more_than_four_thousand_tokens_are_exact(server: Server, trainer: Any) -> None:
    long = [partial(sample, server, [random.Random(i).randrange(1000) for _ in range(4100 + 50 * i)]) for i in range(2)]
    assert_exact(trainer, together(long))


def preemptions(server: Server) -> float:
    counts = re.findall(
        r"^vllm:num_preemptions_total\{.*\} (\S+)$", server.request("GET", "/metrics").text, re.MULTILINE
    )
    return sum(map(float, counts))


@pytest.mark.rotating
def test_preempted_sequences_are_exact(server: Server, trainer: Any) -> None:
    """One request for all the answers: they start together however late a busy machine serves a connection."""
    before = preemptions(server)
    sequences = answers(server, [random.Random(5).randrange(1000) for _ in range(220)], n=30, max_tokens=180)
    assert preemptions(server) > before
    assert_exact(trainer, sequences, budget=1300)


@pytest.mark.rotating
@pytest.mark.parametrize("path", ["use_shared_memory", "single_copy"])
def test_three_steps_of_training_stay_on_policy_to_the_bit(server: Server, path: str) -> None:
    config = TrainerConfig.model_validate(
        {
            "model_name": server.model,
            "weight_bridge_mode": "shared_vllm",
            "vllm_port": server.port,
            "lr": 1e-3,
            "batch_invariant": True,
            "vllm_api_key": API_KEY,
            "bridge_timeout_s": 60,
            **{path: True},
        }
    )
    bridge, model = connect(config, server.model)
    with contextlib.closing(bridge):
        make_exact(model, torch.float32)
        optimizer = make_optimizer(model.parameters(), config)
        bridge.sync(0, lambda: None)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for step in (1, 2, 3):
            sequences = together([partial(sample, server, prompt(index, 90)) for index in range(PROMPTS)])
            comparison = Comparison()
            batches = micro_batches(sequences, 400, model.device, share=True)
            figures = values(batch_gradients(Policy(model), batches, LossSettings(), comparison=comparison))
            assert figures["ratio_mean"] == 1.0, comparison.table()
            assert figures["logprob_diff_max"] == 0.0, comparison.table()
            assert comparison.row()["bit_exact/differing_tokens"] == 0, comparison.table()
            bridge.sync(step, partial(update, optimizer))
        assert server.status()["policy_version"] == 3
        # the policy did move
        assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def with_experts(folder: Path) -> Path:
    """A mixture of experts, with a dense layer."""
    config = Qwen3MoeConfig(
        **SHAPE | {"num_hidden_layers": 3, "head_dim": 32},
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        initializer_range=0.1,
    )
    return save_tiny_model(folder, config)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "ranks", "dtype"),
    [("qwen2", 2, "bfloat16"), ("qwen3_moe", 1, "float32"), ("qwen3_moe", 2, "float32"), ("qwen3_moe", 2, "bfloat16")],
)
def test_a_server_restarted_from_a_checkpoint_is_exact(tmp_path: Path, family: str, ranks: int, dtype: str) -> None:
    folder = (
        with_experts(tmp_path / "experts")
        if family == "qwen3_moe"
        else rotated(Qwen2Config, tmp_path / "linear", rope_type="linear", factor=4.0)
    )
    serving = f"--batch-invariant --num-gpu-blocks-override 64 --tensor-parallel-size {ranks} --dtype {dtype}"
    config = TrainerConfig.model_validate(
        {
            "model_name": str(folder),
            "weight_bridge_mode": "none",
            "vllm_port": free_port(),
            "vllm_restart_interval": 1,
            "vllm_api_key": API_KEY,
            "vllm_flags": serving,
            "save_path": tmp_path / "checkpoints",
            "log_dir": tmp_path,
            "lr": 1e-3,
            "batch_invariant": True,
        }
    )
    bridge, model = connect(config, str(folder))
    with contextlib.closing(bridge):
        make_exact(model, getattr(torch, dtype), tp_size=ranks)
        optimizer = make_optimizer(model.parameters(), config)
        # the bridge's own
        server = Server(config.vllm_port, str(folder), tmp_path / "vllm.log", process=cast(Any, None))
        for version in (0, 1):
            bridge.sync(version, partial(update, optimizer) if version else lambda: None)
            sequences = together([partial(sample, server, prompt(index, 90)) for index in range(PROMPTS)])
            assert_exact(model, sequences)
            batch_gradients(Policy(model), micro_batches(sequences, 400, model.device, share=True), LossSettings())
        assert server.status()["policy_version"] == 1


@pytest.mark.rotating
def test_what_is_not_exact_is_refused_by_name(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError,
        match=r"error: --batch-invariant does not cover --kv-cache-dtype fp8; see docs/bit-exactness\.md",
    ):
        start_server(llama_folder, tmp_path, "--batch-invariant", "--kv-cache-dtype", "fp8")


@pytest.mark.rotating
def test_the_one_file_run_is_exact_and_gives_the_same_bytes_again(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = rotated(LlamaConfig, tmp_path / "llama3", rope_type="llama3", **scaling)
    command = [
        sys.executable,
        "-m",
        "example_trainer.simple_rl",
        "--model",
        str(folder),
        "--steps",
        "3",
        "--prompts",
        "6",
    ]
    command += ["--group-size", "256", "--lr", "1e-3", "--kl-coef", "0.1", "--max-new-tokens", "8", "--out"]
    runs = [tmp_path / "once", tmp_path / "again"]
    processes = [
        subprocess.Popen(tied([*command, str(out)]), stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) for out in runs
    ]
    for process in processes:
        shown, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        assert shown.count("Bitwise identical: True") == 3
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes()
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    assert all(row["ratio_mean"] == 1.0 and row["bit_exact/differing_tokens"] == 0 for row in rows)
    # a random model is right by chance, in one of 500 answers
    assert any(row["weight_delta/model.layers.0/magnitude"] > 0 for row in rows)
    assert rows[0]["kl_div"] == 0  # the start model computes as the policy does
    assert rows[-1]["kl_div"] > 0
    assert list(runs[0].glob("events.out.tfevents.*"))
