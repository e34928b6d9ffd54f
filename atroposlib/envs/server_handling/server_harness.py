"""A server inside the test's own process: it gives the replies that a test defines and refuses every other prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.sequences.sampling import Arguments, SampledSequence, SampledTokens
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig

Messages = Sequence[Mapping[str, object]]

Reply = TypeVar("Reply")
TextFinish = Literal["stop", "length", "content_filter"]
ChatFinish = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


def create_chat_completion(
    resp: str | Sequence[str], n: int = 1, finish_reason: ChatFinish | Sequence[ChatFinish] = "stop"
) -> ChatCompletion:
    """A chat reply with `n` choices of one text, or one choice per text of a list; a list has a finish reason each."""
    texts = _one_each(resp, n)
    reasons: list[ChatFinish] = _one_each(finish_reason, len(texts))
    return ChatCompletion(
        id="harness",
        object="chat.completion",
        created=0,
        model="harness",
        choices=[
            Choice(index=index, finish_reason=reason, message=ChatCompletionMessage(role="assistant", content=each))
            for index, (each, reason) in enumerate(zip(texts, reasons, strict=True))
        ],
    )


def create_completion(
    resp: str | Sequence[str], n: int = 1, finish_reason: TextFinish | Sequence[TextFinish] = "stop"
) -> Completion:
    """A text completion with `n` choices of one text, or one choice per text of a list; finish reasons as above."""
    texts = _one_each(resp, n)
    reasons: list[TextFinish] = _one_each(finish_reason, len(texts))
    return Completion(
        id="harness",
        object="text_completion",
        created=0,
        model="harness",
        choices=[
            CompletionChoice(index=index, finish_reason=reason, text=each)
            for index, (each, reason) in enumerate(zip(texts, reasons, strict=True))
        ],
    )


class ServerHarness(APIServer):
    """Canned replies by prompt. A prompt without one raises KeyError, which no retry hides.

    Tests may put their own `tokenizer` and `config` in place; of the latter only `model_name` is used.
    """

    server_healthy: Any = True
    name = "ServerHarness"
    timeout_s = 60.0

    def __init__(self, config: APIServerConfig | None = None, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config or APIServerConfig(model_name="harness", health_check=False), reasoning_config)
        self._chats: dict[str, ChatCompletion] = {}
        self._completions: dict[str, Completion] = {}
        self._tokens: dict[str, SampledTokens] = {}

    def set_desired_response(self, input_message: Messages, desired_response: ChatCompletion) -> None:
        """Reply `desired_response` to a chat of these messages."""
        self._chats[_chat_key(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: Completion) -> None:
        """Reply `completion` to this text."""
        self._completions[input_message] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[str],
        policy_versions: list[tuple[int, int]] | None = None,
    ) -> None:
        """Sample these tokens for the text `prompt`, or for its ids."""
        versions: Sequence[tuple[int, int] | None] = policy_versions or [None] * len(output_tokens_list)
        self._tokens[prompt] = self._tokens[str(prompt_tokens)] = SampledTokens(
            prompt_tokens,
            [
                SampledSequence(*parts)
                for parts in zip(output_tokens_list, output_logprobs_list, finish_reasons, versions, strict=True)
            ],
        )

    @property
    def tokenizer_id(self) -> str:
        return self.model_name

    async def request_chat(self, arguments: Arguments) -> ChatCompletion:
        return _reply(self._chats, _chat_key(arguments["messages"]))

    async def request_completion(self, arguments: Arguments) -> Completion:
        return _reply(self._completions, arguments["prompt"])

    async def request_tokens(self, arguments: Arguments) -> SampledTokens:
        return _reply(self._tokens, arguments.get("prompt") or str(arguments["input_ids"]))


def _chat_key(messages: Messages) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _one_each(value: Any, count: int) -> list[Any]:
    """A list as it is, anything else `count` times."""
    return [value] * count if isinstance(value, str) else list(value)


def _reply(replies: Mapping[str, Reply], prompt: str) -> Reply:
    if prompt not in replies:
        raise KeyError(f"ServerHarness has no reply for the prompt {prompt!r}; it knows {sorted(replies)}")
    return replies[prompt]
