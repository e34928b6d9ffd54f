"""The flags of `atropos agent-endpoint`, apart from what serves: help loads neither tokenizers nor servers."""

from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from atroposlib.config import Config
from atroposlib.http_guard import HostName

PROG = "atropos agent-endpoint"
PORT = 9200
SERVER_KEY = "ATROPOS_AGENT_ENDPOINT_SERVER_KEY"
TOKEN = "ATROPOS_AGENT_ENDPOINT_TOKEN"
API_TOKEN = "ATROPOS_API_TOKEN"
BODY_MB = 32
KEEP_ALIVE_S = 5.0


class AgentEndpointConfig(Config):
    """Serve OpenAI's and Anthropic's APIs to agents, and keep the tokens of their calls for training."""

    server: list[str] = Field(
        default=["http://127.0.0.1:9001/v1"], description="Address of a vLLM server with /v1; repeatable."
    )
    api: str = Field(
        default="",
        description="Address of the run's batching API, whose list of servers that join or leave is followed.",
    )
    api_token: SecretStr = Field(default=SecretStr(""), description="Its token.", json_schema_extra={"env": API_TOKEN})
    server_key: SecretStr = Field(
        default=SecretStr(""), description="API key of the servers.", json_schema_extra={"env": SERVER_KEY}
    )
    model: str = Field(default="default", description="Name of the served model; also a directory of its tokenizer.")
    tokenizer: str = Field(default="", description="Name or directory of the tokenizer, if it is not that of --model.")
    chat_template: str | None = Field(
        default=None, description="Jinja file with which conversations become prompts; default: the tokenizer's."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description='Arguments of the chat template as JSON, such as {"enable_thinking": false}.'
    )
    wait_s: float = Field(default=1800.0, gt=0, description="Seconds to wait at the start until a server answers.")
    also_model: list[str] = Field(
        default=[], description="Another name of the model that agents may use; repeatable; '*' for any."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; any but loopback needs a token.")
    allowed_host: list[HostName] = Field(
        default=[], description="Another host name under which agents may address it; repeatable."
    )
    port: int = Field(default=PORT, ge=0, le=65535, description="Port to listen on; 0 for a free one.")
    token: SecretStr = Field(
        default=SecretStr(""),
        description="Key that opens everything; a session's opens that one.",
        json_schema_extra={"env": TOKEN},
    )
    journal: Path | None = Field(
        default=None, description="File in which each turn is kept before its reply leaves; none: turns die with it."
    )
    max_body_mb: float = Field(default=BODY_MB, gt=0, description="Largest request in MiB.")
    keep_alive_s: float = Field(default=KEEP_ALIVE_S, gt=0, description="Seconds between signs of life in a stream.")
