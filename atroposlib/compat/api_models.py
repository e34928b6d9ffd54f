"""The bodies of the batching API's requests and replies as pydantic models, for clients that import them from
`atroposlib.api.server`. The API itself reads `atroposlib.wire.batching`.
"""

from typing import Any

from pydantic import BaseModel


class Registration(BaseModel):
    """POST /register."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class RegisterEnv(BaseModel):
    """POST /register-env."""

    max_token_length: int
    desired_name: str
    weight: float
    group_size: int
    min_batch_allocation: float | None = None


class EnvIdentifier(BaseModel):
    """POST /disconnect-env, GET /status-env."""

    env_id: int


class ScoredData(BaseModel):
    """POST /scored_data; lists have one entry per sequence."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None


class Status(BaseModel):
    """Reply of GET /status."""

    current_step: int
    queue_size: int


class Info(BaseModel):
    """Reply of GET /info."""

    batch_size: int = -1
