"""How much a reasoning model may think, in the two dialects that OpenAI-compatible servers speak."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from atroposlib.config import Config

if TYPE_CHECKING:  # loads numpy
    from atroposlib.envs.server_handling.sequences.sampling import Arguments

OPENAI_URL = "https://api.openai.com/v1"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ReasoningConfig(Config):
    """Setting `effort` or `max_tokens` enables reasoning; when both are set, effort wins. Providers limit the tokens,
    not this class.
    """

    # Tokens that stand for an effort where a provider takes nothing else.
    EFFORT_TO_MAX_TOKENS: ClassVar[Mapping[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    enabled: bool = False
    effort: Effort | None = None
    max_tokens: int | None = None

    def __init__(
        self, enabled: bool = False, effort: Effort | None = None, max_tokens: int | None = None, **unknown: object
    ) -> None:
        super().__init__(**{"enabled": enabled, "effort": effort, "max_tokens": max_tokens, **unknown})

    @classmethod
    def from_env_config(cls, config: Any) -> "ReasoningConfig":
        """Read what a BaseEnvConfig says about reasoning."""
        return cls(enabled=config.thinking_mode, effort=config.reasoning_effort, max_tokens=config.max_reasoning_tokens)

    @field_validator("effort", mode="before")
    @classmethod
    def _is_an_effort(cls, effort: object) -> object:
        if effort is not None and effort not in get_args(Effort):
            raise ValueError(f"Invalid reasoning_effort {effort!r}; choose one of: {', '.join(get_args(Effort))}")
        return effort

    @model_validator(mode="after")
    def _enable_by_detail(self) -> "ReasoningConfig":
        self.enabled = self.enabled or self.effort is not None or self.max_tokens is not None
        return self

    def is_reasoning_kwargs_active(self) -> bool:
        """Return whether reasoning is asked for."""
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> "Arguments | None":
        """The part of a request's body that asks for reasoning, in the dialect of `base_url`; None when it is off.

        With `use_max_tokens` an effort is expressed in tokens.
        """
        if not self.enabled:
            return None
        if base_url and is_openai(base_url):
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: Arguments = {"enabled": True}
        if self.effort is not None:
            reasoning |= (
                {"max_tokens": self.EFFORT_TO_MAX_TOKENS[self.effort]} if use_max_tokens else {"effort": self.effort}
            )
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}

    def chat_arguments(self, arguments: "Arguments", base_url: str) -> "Arguments":
        """The arguments of a chat request with reasoning asked for, in the dialect of the server at `base_url`."""
        if not self.enabled:
            return arguments
        address = base_url or OPENAI_URL
        asked = {
            **arguments,
            "extra_body": {**(self.build_extra_body(address) or {}), **(arguments.get("extra_body") or {})},
        }
        if is_openai(address):  # its reasoning models accept temperature 1 only, and count tokens under another name
            asked["temperature"] = 1.0
            if "max_tokens" in asked:
                asked["max_completion_tokens"] = asked.pop("max_tokens")
        return asked


def is_openai(base_url: str) -> bool:
    """Return whether `base_url` is OpenAI's own API (which an empty address means)."""
    return not base_url or urlsplit(base_url).hostname == "api.openai.com"
