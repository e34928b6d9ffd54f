"""A ManagedServer under the face of `openai.AsyncOpenAI`, for agent libraries that insist on one."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol

from openai.types import Completion
from openai.types.chat import ChatCompletion


class Conversation(Protocol):
    """A ManagedServer, or the stand-in for one."""

    @property
    def chat_completion(self) -> Callable[..., Awaitable[ChatCompletion]]:
        """As `ManagedServer.chat_completion`."""

    @property
    def completion(self) -> Callable[..., Awaitable[Completion]]:
        """As `ManagedServer.completion`."""


class _ChatCompletions:
    def __init__(self, managed_server: Conversation) -> None:
        self._managed_server = managed_server

    async def create(self, **arguments: Any) -> ChatCompletion:
        """As the SDK's `chat.completions.create`."""
        return await self._managed_server.chat_completion(**arguments)


class _Chat:
    def __init__(self, managed_server: Conversation) -> None:
        self.completions = _ChatCompletions(managed_server)


class _Completions:
    def __init__(self, managed_server: Conversation) -> None:
        self._managed_server = managed_server

    async def create(self, **arguments: Any) -> Completion:
        """As the SDK's `completions.create`."""
        return await self._managed_server.completion(**arguments)


class ManagedServerAdapter:
    """`chat.completions.create`, `completions.create` and `base_url`; everything else of the SDK raises."""

    def __init__(self, managed_server: Conversation, base_url: str | None = None) -> None:
        self.base_url = base_url
        self.chat = _Chat(managed_server)
        self.completions = _Completions(managed_server)

    async def post(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raw requests would bypass the bookkeeping."""
        raise NotImplementedError(
            "ManagedServerAdapter offers no raw requests; use chat.completions.create or completions.create"
        )

    def copy(self, **kwargs: Any) -> NoReturn:
        """A copy with other options would be another server."""
        raise NotImplementedError("ManagedServerAdapter cannot be copied; make one per ManagedServer")
