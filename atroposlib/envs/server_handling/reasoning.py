"""How much a reasoning model may think, in the two dialects that OpenAI-compatible servers speak."""

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from atroposlib.config import Config

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ReasoningConfig(Config):
    """Setting `effort` or `max_tokens` enables reasoning; when both are set, effort wins."""

    enabled: bool = False
    effort: Effort | None = None
    max_tokens: int | None = Field(default=None, ge=1024, le=32000)

    @model_validator(mode="after")
    def _enable_by_detail(self) -> "ReasoningConfig":
        self.enabled = self.enabled or self.effort is not None or self.max_tokens is not None
        return self

    def chat_arguments(self, arguments: dict[str, Any], base_url: str) -> dict[str, Any]:
        """The arguments of a chat request with reasoning asked for, in the dialect of the server at `base_url`."""
        if not self.enabled:
            return arguments
        if is_openai(base_url):
            return self._for_openai(arguments)
        reasoning: dict[str, Any] = {"enabled": True}
        if self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {**arguments, "extra_body": {"reasoning": reasoning, **(arguments.get("extra_body") or {})}}

    def _for_openai(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's reasoning models accept temperature 1 only, and count tokens under another name."""
        body = {"reasoning_effort": self.effort or "medium", **(arguments.get("extra_body") or {})}
        asked = {**arguments, "temperature": 1.0, "extra_body": body}
        if "max_tokens" in asked:
            asked["max_completion_tokens"] = asked.pop("max_tokens")
        return asked


def is_openai(base_url: str) -> bool:
    """Whether `base_url` is OpenAI's own API (which an empty address means)."""
    return not base_url or urlsplit(base_url).hostname == "api.openai.com"
