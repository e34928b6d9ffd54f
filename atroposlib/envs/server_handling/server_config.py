"""An environment's settings for its inference servers: limits, addresses, and the environment variables that matter.

`ServerBaseline` holds limits only and lets the manager find the servers (fixed local ports, or SLURM);
`APIServerConfig` adds the address of one server. Both warn about unknown keys instead of refusing them, because
environments written for the ancestor pass some.
"""

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from atroposlib.config import Config
from atroposlib.logs import get_logger

log = get_logger(__name__)

WITH_PORT = re.compile(r"[\w.-]+:\d+(?:/|$)")

ServerType = Literal["openai", "trl", "sglang", "vllm"]


class ServerBaseline(Config):
    """Limits that hold for every server, without an address."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    timeout: int = Field(
        default=1200,
        gt=0,
        description="Seconds for one request, and for a call to wait until a dead server answers again.",
    )
    num_max_requests_at_once: int = Field(default=512, ge=1, description="Training requests in flight per server.")
    num_requests_for_eval: int = Field(default=64, ge=1, description="Evaluation requests in flight per server.")
    model_name: str = Field(default="default", description="Name of the model at the server.")
    rolling_buffer_length: int = Field(default=1000, ge=1, description="Requests that the timing metrics look back on.")
    server_type: ServerType = Field(default="openai", description="Protocol of the server.")
    tokenizer_name: str = Field(default="none", description="Tokenizer to load; 'none' means the one of model_name.")

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys_that_are_set(cls, values: object) -> object:
        """Unknown keys are named; None means the default, since environments pass what `os.environ.get` or a YAML file
        gave them.
        """
        if isinstance(values, Mapping):
            values = {key: value for key, value in values.items() if value is not None}
            for key in sorted(str(key) for key in values.keys() - cls.model_fields.keys()):
                close = difflib.get_close_matches(key, cls.model_fields, n=1)
                log.warning(
                    "%s ignores the unknown key '%s'%s",
                    cls.__name__,
                    key,
                    f"; did you mean '{close[0]}'?" if close else "",
                )
        return values

    @property
    def tokenizer_id(self) -> str:
        """Name or path of the tokenizer of this server's model."""
        return self.model_name if self.tokenizer_name == "none" else self.tokenizer_name


class APIServerConfig(ServerBaseline):
    """One inference server."""

    api_key: str = Field(default="", repr=False, description="Bearer token to send if not empty.")
    api_key_env: str = Field(default="", description="Environment variable that holds the key, without api_key.")
    base_url: str = Field(
        default="", description="Address with its /v1, e.g. http://localhost:9001/v1; empty means OpenAI's own API."
    )
    n_kwarg_is_ignored: bool = Field(
        default=False, description="The server returns one completion whatever n is: send n requests instead."
    )
    health_check: bool = Field(default=True, description="Check every few seconds whether the server is alive.")

    @field_validator("base_url")
    @classmethod
    def _has_scheme(cls, base_url: str) -> str:
        """`localhost:9001/v1` means http, as only servers of one's own are addressed by their port."""
        base_url = base_url.strip()
        if WITH_PORT.match(base_url):
            return f"http://{base_url}"
        if base_url and not base_url.startswith(("http://", "https://")):
            raise ValueError("base_url must start with http:// or https://, e.g. http://localhost:9001/v1")
        if "@" in base_url.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url has a password, and logs name the URL: give api_key, and the URL without it")
        return base_url

    @model_validator(mode="after")
    def _key_is_there(self) -> Self:
        if self.api_key_env and not self.key:
            raise ValueError(f"api_key_env: the environment variable {self.api_key_env} is not set; set it to the key")
        return self

    @property
    def key(self) -> str:
        """The bearer token, empty for none. It is not a field, so that no configuration that is written has it."""
        return self.api_key or os.environ.get(self.api_key_env, "")

    @field_serializer("api_key", when_used="json")
    def _mask_api_key(self, api_key: str) -> str:
        return "**********" if api_key else ""


class ServerManagerConfig(Config):
    """How the manager finds and uses its servers."""

    slurm: bool = Field(default=False, description="Take the servers from the node list of the SLURM job.")
    testing: bool = Field(default=False, description="Use one in-process server with canned replies.")
    max_n_completions: int = Field(default=8, ge=1, description="A request for more completions is split into several.")
    proxy_url: str | None = Field(default=None, description="Address of a managed proxy.")


class ServerEnvironment(BaseModel):
    """The environment variables that the inference clients honour; read when a ServerManager is built."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    slurm_job_nodelist: str | None = Field(default=None, validation_alias="SLURM_JOB_NODELIST")
    num_training_nodes: int = Field(default=0, ge=0, validation_alias="NUM_TRAINING_NODES")
    infer_tp: int = Field(default=1, ge=1, le=8, validation_alias="INFER_TP")
    proxy_url: str | None = Field(default=None, validation_alias="ATROPOS_PROXY_URL")
    allow_dummy_managed_server: bool = Field(default=False, validation_alias="ATROPOS_ALLOW_DUMMY_MANAGED_SERVER")
    openai_api_key: str | None = Field(default=None, repr=False, validation_alias="OPENAI_API_KEY")

    @classmethod
    def read(cls) -> Self:
        """Read the variables of this process; an empty one counts as not set. Raises ValidationError."""
        return cls.model_validate({name: value for name, value in os.environ.items() if value})


def resolve_openai_configs(
    default_server_configs: object,
    openai_config_dict: Mapping[str, object],
    yaml_config: Mapping[str, object],
    cli_passed_flags: Mapping[str, object],
    logger: object = None,
) -> Any:
    """The ancestor's function: the servers of a list in YAML, those of a default list or baseline, or one that is
    merged from all. Raises ValueError for flags where several servers are configured.
    """
    in_yaml = yaml_config.get("openai")
    listed = in_yaml if isinstance(in_yaml, list) else default_server_configs
    if isinstance(listed, list) and len(listed) > 1:
        if any(name.startswith("openai.") for name in cli_passed_flags):
            raise ValueError(f"--openai.* sets one inference server, but {len(listed)} are configured")
        return [each if isinstance(each, ServerBaseline) else APIServerConfig(**each) for each in listed]
    if isinstance(default_server_configs, ServerBaseline) and not isinstance(default_server_configs, APIServerConfig):
        return default_server_configs
    one = APIServerConfig(**openai_config_dict)
    return one if isinstance(default_server_configs, APIServerConfig) else [one]
