"""LoRA on a real vLLM: every version is served as trained, environments follow without a restart, and nothing bad is
ever served.
"""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from example_trainer.bridges import BridgeError, WeightBridge, make_bridge
from example_trainer.loop.learner import Learner
from example_trainer.loop.opening import connected
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.lora import adapter_tensors
from tests.client import http
from tests.integration.conftest import API_KEY, AUTHORIZED, Server, start_server, stop_server
from tests.integration.namespaces import tied
from tests.waiting import wait_until

CPU = torch.device("cpu")
# fp32 on both sides; the same adapter differs by about 1e-6 on this model, the versions below by more than 1e-2
PARITY = 2e-5
PROMPT = list(range(5, 45))  # longer than a KV block, so that the prefix cache takes part
DEADLINE_S = 120


@pytest.fixture(scope="module")
def server(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = start_server(llama_folder, tmp_path_factory.mktemp("vllm_lora"), "--enable-lora", "--max-lora-rank", "16")
    yield found
    stop_server(found)


def lora_config(model: str, port: int, save_path: Path, **changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = dict(
        model_name=model,
        weight_bridge_mode="lora_only",
        lora_r=8,
        vllm_port=port,
        vllm_api_key=API_KEY,
        save_path=save_path,
        bridge_timeout_s=60,
        bridge_lease_s=20,
    )
    return TrainerConfig(**settings | changes)


@contextlib.contextmanager
def trainer(server: Server, save_path: Path, **changes: Any) -> Iterator[tuple[WeightBridge, PreTrainedModel]]:
    config = lora_config(server.model, server.port, save_path, **changes)
    learner = Learner(config, CPU, ALONE)
    with connected(learner, make_bridge(config), server.model) as bridge:
        yield bridge, learner.trained.model


@torch.no_grad()
def move(model: PreTrainedModel, seed: int) -> None:
    """An update that no one could mistake for none."""
    torch.manual_seed(seed)
    for tensor in adapter_tensors(model).values():
        tensor.add_(torch.randn_like(tensor) * 0.05)


def complete(server: Server, model: str | None, **sampling: Any) -> dict[str, Any]:
    """One greedy completion through the OpenAI route; without `model`, none is named."""
    body = (
        {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
        | ({"model": model} if model else {})
        | sampling
    )
    reply = http.post(f"{server.url}/v1/completions", json=body, headers=AUTHORIZED, timeout=DEADLINE_S)
    return {"status": reply.status_code, **reply.json()}


def served_names(server: Server) -> list[str]:
    return [
        card["id"]
        for card in http.get(f"{server.url}/v1/models", headers=AUTHORIZED, timeout=DEADLINE_S).json()["data"]
    ]


def test_every_version_is_served_as_trained_and_environments_follow(server: Server, tmp_path: Path) -> None:
    untouched = complete(server, "base")["choices"][0]["logprobs"]
    with trainer(server, tmp_path) as (bridge, model):
        seen: list[Any] = []
        for version in range(1, 5):
            report = bridge.sync(version, partial(move, model, version))
            assert bridge.parity_probe() <= PARITY
            print(
                f"version {version}: written {report.transfer_s:.3f} s, loaded {report.apply_s:.3f} s,"
                f" {report.bytes_moved} bytes"
            )

            status = server.status()
            name = status["served_model"]
            assert status["policy_version"] == version
            assert name.startswith(f"policy-v{version}-")
            ours = server.generate(PROMPT, max_tokens=8, temperature=0, logprobs=0)
            assert ours["policy_versions"] == [[version, version]]
            sampled = [next(iter(entry.values())) for (entry,) in ours["logprobs"][0]]
            for alias in (None, "default", server.model, name):  # whatever an environment was told when it started
                reply = complete(server, alias)
                assert reply["model"] == name, alias
                assert reply["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(sampled, abs=1e-5)
            chat = {"model": "default", "messages": [{"role": "user", "content": "2 + 2 ="}], "max_tokens": 2}
            url = f"{server.url}/v1/chat/completions"
            assert http.post(url, json=chat, headers=AUTHORIZED, timeout=DEADLINE_S).json()["model"] == name

            assert complete(server, "base")["choices"][0]["logprobs"] == untouched
            assert server.generate(PROMPT, max_tokens=1, model="base")["policy_versions"] == [[0, 0]]
            assert served_names(server) == [server.model, "default", "base", name]
            if seen:
                assert complete(server, seen[-1])["status"] == 404
                assert sorted(folder.name for folder in (tmp_path / "adapters").iterdir()) == sorted([seen[-1], name])
            seen.append(name)


@pytest.mark.rotating
def test_requests_in_flight_finish_with_the_adapter_they_started_with(server: Server, tmp_path: Path) -> None:
    long = dict(max_tokens=300, temperature=0, ignore_eos=True)
    untouched = complete(server, "base")["choices"][0]["logprobs"]["token_logprobs"]
    with trainer(server, tmp_path) as (bridge, model):
        bridge.sync(1, lambda: move(model, 1))
        alone = server.generate(PROMPT, **long)["token_ids"]
        replies: dict[str, dict[str, Any]] = {}
        runs = [
            threading.Thread(target=lambda: replies.update(generate=server.generate(PROMPT, **long))),
            threading.Thread(
                target=lambda: replies.update(openai=complete(server, "default", return_token_ids=True, **long))
            ),
        ]
        for run in runs:
            run.start()
        first = server.status()["served_model"]
        wait_until(lambda: server.status()["adapters_in_use"] == [first], DEADLINE_S)
        for version in (2, 3):
            bridge.sync(version, partial(move, model, version))
            assert server.generate(PROMPT, max_tokens=2)["policy_versions"] == [[version, version]]
            # in a batch with the adapter's requests
            beside = complete(server, "base")["choices"][0]["logprobs"]["token_logprobs"]
            assert beside == pytest.approx(untouched, abs=1e-4)
        assert (tmp_path / "adapters" / first).is_dir() or not server.status()["adapters_in_use"]
        for run in runs:
            run.join(DEADLINE_S)
        assert replies["generate"]["token_ids"] == alone
        assert replies["generate"]["policy_versions"] == [[1, 1]]
        assert replies["openai"]["choices"][0]["token_ids"] == alone[0]
        assert replies["openai"]["model"] == first
        wait_until(lambda: f"Unloaded {first}" in server.log.read_text(), DEADLINE_S)
        assert bridge.parity_probe() <= PARITY


@pytest.mark.rotating
def test_killed_trainer_leaves_its_adapter_served_and_the_next_takes_over_at_once(
    server: Server, tmp_path: Path
) -> None:
    child = subprocess.Popen(
        tied([sys.executable, "-m", "tests.integration.lora_child", server.model, str(server.port), str(tmp_path)]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stderr is not None
    assert any(line.startswith("SERVED 1") for line in child.stdout), child.stderr.read()[-2000:]
    with pytest.raises(BridgeError, match=r"holds session .* stop it, or wait for its lease to end"):
        make_bridge(lora_config(server.model, server.port, tmp_path))(server.model, CPU)
    left = server.status()["served_model"]
    leftover = tmp_path / "adapters" / f".policy-v2-aaaaaa.partial-{child.pid}"
    leftover.mkdir()
    child.kill()
    child.wait(90)
    assert complete(server, "default")["model"] == left
    assert server.generate(PROMPT, max_tokens=2)["policy_versions"] == [[1, 1]]
    with trainer(server, tmp_path) as (bridge, _model):
        bridge.sync(0, lambda: None)  # a fresh run: its version 0 is another adapter than any before
        assert server.status()["served_model"] != left
        assert not leftover.exists()
        assert bridge.parity_probe() <= PARITY


def save_foreign_adapter(folder: Path, model_folder: str, rank: int = 8, base: str | None = None) -> Path:
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder), LoraConfig(r=rank, target_modules=["q_proj", "o_proj"])
    )
    model.peft_config["default"].base_model_name_or_path = base or model_folder
    model.save_pretrained(str(folder))
    return folder


def post_adapter(server: Server, path: Path, name: str = "policy-v9-bad") -> httpx.Response:
    body = {"name": name, "path": str(path), "policy_version": 9}
    return http.post(f"{server.url}/v1/bridge/adapter", json=body, headers=AUTHORIZED, timeout=DEADLINE_S)


@pytest.mark.rotating
def test_a_bad_adapter_is_refused_and_the_one_before_still_served(
    server: Server, qwen_folder: Path, tmp_path: Path
) -> None:
    with trainer(server, tmp_path) as (bridge, model):
        bridge.sync(5, lambda: move(model, 5))
        assert post_adapter(server, tmp_path, "policy-v6-stranger").status_code == 409  # a trainer lives
    name, before = (
        server.status()["served_model"],
        complete(server, "default")["choices"][0]["logprobs"]["token_logprobs"],
    )
    other = tmp_path / "other"  # other shapes under the served model's name
    AutoModelForCausalLM.from_config(
        type(model.config)(**model.config.to_dict() | {"hidden_size": 256})
    ).save_pretrained(other)
    truncated = save_foreign_adapter(tmp_path / "truncated", server.model)
    os.truncate(truncated / "adapter_model.safetensors", 500)
    cases = {
        save_foreign_adapter(
            tmp_path / "r32", server.model, rank=32
        ): "rank 32 is more than this server's --max-lora-rank 16",
        save_foreign_adapter(tmp_path / "qwen", str(qwen_folder)): f"this server serves {server.model}",
        save_foreign_adapter(tmp_path / "wide", str(other), base=server.model): "vLLM cannot load",
        truncated: "cannot be read as a PEFT adapter directory",
        tmp_path / "nowhere": "cannot be read as a PEFT adapter directory",
    }
    for attempt, (folder, message) in enumerate(cases.items()):
        reply = post_adapter(server, folder, f"policy-v9-bad{attempt}")
        assert reply.status_code == 422, (folder, reply.text)
        assert message in reply.text, (folder, reply.text)
        assert server.status()["served_model"] == served_names(server)[-1] == name
        assert complete(server, "default")["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
            before, abs=1e-5
        )
    good = save_foreign_adapter(tmp_path / "good", server.model)
    assert post_adapter(server, good, name).status_code == 422  # a name that was used
    assert post_adapter(server, good, "policy-v9-byhand").status_code == 200
    assert server.generate(PROMPT, max_tokens=2)["policy_versions"] == [[9, 9]]


@pytest.mark.rotating
def test_a_disk_that_fills_up_ends_the_trainer_and_leaves_the_adapter_served(server: Server, tmp_path: Path) -> None:
    with trainer(server, tmp_path) as (bridge, model):
        bridge.sync(0, lambda: None)
        name = server.status()["served_model"]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # the adapter has about 200 kB: the write fails half-way
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(BridgeError, match=f"cannot write .*policy-v1-.* vLLM keeps serving {name}"):
                bridge.sync(1, lambda: move(model, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert complete(server, "default")["model"] == name
        assert [folder.name for folder in (tmp_path / "adapters").iterdir()] == [name]


@pytest.mark.rotating
def test_what_does_not_fit_is_refused_before_the_model_is_loaded(
    server: Server, qwen_folder: Path, tmp_path: Path
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(lora_r=32), "rank 32 is more than this server's --max-lora-rank 16"),
        (dict(model_name=str(qwen_folder)), "give both the same name or path"),
    ]
    for changes, message in cases:
        with pytest.raises(BridgeError, match=message):
            make_bridge(lora_config(server.model, server.port, tmp_path, **changes))(server.model, CPU)
    whole = {"session": "s", "policy_version": 1}
    reply = http.post(f"{server.url}/v1/bridge/commit", json=whole, headers=AUTHORIZED, timeout=DEADLINE_S)
    assert reply.status_code == 409
    assert "restart it without --enable-lora" in reply.text
    assert http.post(f"{server.url}/v1/bridge/adapter", json={}, timeout=DEADLINE_S).status_code == 401


@pytest.mark.rotating
def test_a_server_without_lora_is_refused_with_the_remedy(vllm_server: Server, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="does not accept LoRA adapters: restart it with --enable-lora"):
        make_bridge(lora_config(vllm_server.model, vllm_server.port, tmp_path))(vllm_server.model, CPU)
    assert "--enable-lora --max-lora-rank" in post_adapter(vllm_server, tmp_path).text


def fill(folder: Path, value: float) -> Path:
    """The adapter of `folder` with nothing but `value` in it."""
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


@pytest.mark.rotating
def test_an_adapter_that_is_not_what_it_claims_is_refused_and_the_one_before_still_served(
    server: Server, tmp_path: Path
) -> None:
    good = save_foreign_adapter(tmp_path / "good", server.model)
    assert post_adapter(server, good, "policy-v9-good").status_code == 200
    tensors = load_file(good / "adapter_model.safetensors")
    a = next(name for name in tensors if name.endswith("lora_A.weight"))
    b = a.replace("lora_A", "lora_B")
    elsewhere = {name.replace("layers.0", "layers.77"): tensors[name].clone() for name in (a, b)}
    cases: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "nan": ({a: torch.full_like(tensors[a], torch.nan)}, "NaN or infinity"),
        "narrow": (
            {a: torch.zeros(8, 3), b: torch.zeros(5, 8)},
            "the served model's layer has 128 inputs and 128 outputs",
        ),
        "transposed": ({a: tensors[a].T.contiguous()}, "expected [r, in] and [out, r] of rank 8"),
        "elsewhere": (elsewhere, "has no layer model.layers.77"),
    }
    for attempt, (name, (changes, message)) in enumerate(cases.items()):
        folder = Path(shutil.copytree(good, tmp_path / name))
        save_file({**tensors, **changes}, folder / "adapter_model.safetensors")
        reply = post_adapter(server, folder, f"policy-v9-{attempt}")
        assert reply.status_code == 422, (name, reply.text)
        assert message in reply.text, (name, reply.text)
        assert server.status()["served_model"] == "policy-v9-good"
    for name in ("", "a" * 129, "policy\n", "\x1b[2J", "\u202e"):
        assert post_adapter(server, good, name).status_code in (400, 422), name
    assert server.generate(PROMPT, max_tokens=2, logprobs=0)["policy_versions"] == [[9, 9]]


@pytest.mark.rotating
def test_numbers_that_are_not_finite_reach_no_later_request(server: Server, tmp_path: Path) -> None:
    """An adapter of finite numbers that overflow leaves NaN in the KV blocks of its requests, which the next ones
    get.
    """
    before = [
        complete(server, "base", prompt=PROMPT[:length])["choices"][0]["logprobs"]["token_logprobs"]
        for length in (3, 20, 40)
    ]
    huge = fill(save_foreign_adapter(tmp_path / "huge", server.model), 1e30)
    assert post_adapter(server, huge, f"policy-v9-{tmp_path.name}-huge").status_code == 200
    for length in (3, 20, 40):
        reply = server.request(
            "POST", "/generate", json={"prompt": {"prompt_token_ids": PROMPT[:length]}, "max_tokens": 8, "logprobs": 0}
        )
        assert reply.status_code == 500
        assert "log-probabilities are not finite" in reply.text
    healthy = fill(save_foreign_adapter(tmp_path / "healthy", server.model), 0.0)
    assert post_adapter(server, healthy, f"policy-v9-{tmp_path.name}-healthy").status_code == 200
    for length, logprobs in zip((3, 20, 40), before, strict=True):
        found = complete(server, "default", prompt=PROMPT[:length])["choices"][0]["logprobs"]["token_logprobs"]
        assert found == pytest.approx(logprobs, abs=1e-5)
