"""Requests as clients of the batching API send them."""

import subprocess
import sys
import time
from typing import Any

import httpx
from fastapi.testclient import TestClient

from atroposlib.api.groups.posted_groups import read_groups
from atroposlib.api.settings import RunApiConfig
from atroposlib.wire.batching import PostedData
from tests.client import http

DEADLINE_S = 30.0
ITEM_KEYS = [
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
]


def api_settings(**given: Any) -> RunApiConfig:
    """Settings as flags give them; limits in MiB may be given in bytes (`max_body_bytes`), so that few are enough."""
    in_bytes = {name: given.pop(name) for name in list(given) if name.endswith("_bytes")}
    return RunApiConfig(**given).model_copy(update=in_bytes)


def registration(batch_size: Any = 8, **other: Any) -> dict[str, Any]:
    return {
        "wandb_group": "group",
        "wandb_project": "project",
        "batch_size": batch_size,
        "max_token_len": 512,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 10,
        "starting_step": 0,
        "num_steps": 100,
        **other,
    }


def environment(group_size: int = 4, **other: Any) -> dict[str, Any]:
    return {"max_token_length": 512, "desired_name": "math", "weight": 1.0, "group_size": group_size, **other}


def group(sequences: int = 4, mark: int = 0, **other: Any) -> dict[str, Any]:
    """A group whose first token is `mark`."""
    tokens = [[mark, index] for index in range(sequences)]
    return {
        "tokens": tokens,
        "masks": [[-100, index] for index in range(sequences)],
        "scores": [0.5] * sequences,
        **other,
    }


def read_group(body: bytes, packed: bool) -> tuple[PostedData, bytes]:
    (read,) = read_groups(body, packed, in_list=False)
    return read


def register(client: TestClient, batch_size: int = 8, **other: Any) -> None:
    """Register a trainer and poll once, so that environments may join."""
    assert client.post("/register", json=registration(batch_size, **other)).status_code == 200
    assert client.get("/batch").status_code == 200


def register_env(client: TestClient, group_size: int = 4, **other: Any) -> int:
    reply = client.post("/register-env", json=environment(group_size, **other)).json()
    assert reply["status"] == "success"
    env_id: int = reply["env_id"]
    return env_id


def marks(client: TestClient) -> list[int] | None:
    """The first tokens of the groups of the next batch."""
    batch = client.get("/batch").json()["batch"]
    return None if batch is None else [item["tokens"][0][0] for item in batch]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "atroposlib.cli.run_api", *arguments]


def wait_until_healthy(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        try:
            http.get(f"{url}/health", timeout=1)
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError(url)
