"""`ToolEnv`: a `QuestionEnv` whose model may call tools, over several turns. The author writes the task and the tools.

    prompt(item) ─▶ model ─▶ calls? ─▶ Toolbox ─▶ results as messages ─▶ model ─▶ ... ─▶ answer ─▶ score(item, answer)
                                └ none, or `max_turns`, or no room left: the conversation ends

What the model wrote is trained on, over all turns. The results of tools, and what the template puts around them, are
not. `state` of the rollout has `tool_calls` and `tool_errors` (how many) and `last_results` (a CallResult for each call
of the last turn that had any); tools of a rollout may keep what they like there, and `score` may read it.

Tools come from `tools`, from `tools_for`, and from an MCP server. The chat template shows them to the model; if it
knows no tools, the system prompt does, in the form of Hermes and Qwen.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from atroposlib.envs.authors.author_errors import origin
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.errors import EnvError, WrongSetting
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.foreign.mcp_tools import McpServer
from atroposlib.envs.metrics import Metrics
from atroposlib.envs.payloads import Item
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig, Rollout, Split, with_reply
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.envs.tools import CallResult, Tool, Toolbox, ToolLike, listed
from atroposlib.envs.tools import ToolError as ToolError  # authors import it from here
from atroposlib.logs import get_logger
from atroposlib.type_definitions import Messages

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.managed_server import ManagedServer

log = get_logger(__name__)

CALL_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")  # of a call, even of one that cannot be read
UNREADABLE = 'Error: the tool call could not be read; expected <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


class ToolEnvConfig(QuestionEnvConfig):
    """Settings of a `ToolEnv`, besides those of every question environment."""

    max_new_tokens: int = Field(default=512, ge=1, description="Most tokens of one turn.")
    max_turns: int = Field(default=8, ge=1, description="Most turns of the model in one conversation.")
    max_tool_calls: int = Field(default=16, ge=1, description="Most tool calls of one turn; more are not made.")
    tool_timeout: float = Field(default=30.0, gt=0, description="Seconds that one call of a tool may take.")
    tool_result_limit: int = Field(default=10_000, ge=1, description="Most characters of a tool's result.")
    tool_parser: str = Field(
        default="hermes",
        description=(
            "How the model writes calls: hermes, llama3_json, mistral; vllm or vllm:NAME for a parser of the vLLM"
            " server; renderers or renderers:NAME for one of the package renderers."
        ),
    )
    tool_role: str = Field(
        default="tool", description="Role of the results' messages; 'user' for chat templates without tools."
    )
    mcp_command: str | None = Field(
        default=None, description="Command that starts an MCP server, whose tools the model may call, too."
    )
    mcp_url: str | None = Field(
        default=None, description="Address of an MCP server (streamable HTTP), whose tools the model may call, too."
    )


class ToolEnv(QuestionEnv):
    """Write `setup`, `training_item`, `prompt`, `score`, and `tools` or `tools_for`."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = ToolEnvConfig
    tools: ClassVar[Sequence[ToolLike]] = ()

    def __init__(self, config: ToolEnvConfig, *args: Any, **named: Any) -> None:
        from atroposlib.envs.server_handling.tool_call_parsers import check_tool_parser  # `--help` does not need it

        super().__init__(config, *args, **named)
        try:
            self.server.tool_parser = check_tool_parser(config.tool_parser)
        except ValueError as error:
            raise WrongSetting(f"--env.{error}") from None
        self._own_tools = [Tool.of(function) for function in listed(self.tools, "tools")]
        if config.deterministic and (config.mcp_command or config.mcp_url):
            raise ValueError("deterministic: the tools of an MCP server may answer otherwise; drop one of them")
        self._mcp = McpServer.of(config.mcp_command, config.mcp_url, config.tool_timeout)
        self._counts: Counter[str] = Counter()  # of training rollouts since the last log
        self._told: set[str] = set()

    def tools_for(self, item: Item, state: dict[str, Any]) -> Sequence[ToolLike]:
        """The tools of one rollout; override it for tools with a state of their own, which may be kept in `state`."""
        return self._own_tools

    async def rollouts(self, item: Item, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        """`n` conversations, each going its own way."""
        return await gather_or_cancel([self._converse(item, split, temperature, top_p) for _ in range(n)])

    async def _converse(self, item: Item, split: Split, temperature: float, top_p: float) -> Rollout:
        state: dict[str, Any] = {"tool_calls": 0, "tool_errors": 0, "last_results": []}
        box = await self._toolbox(item, state)
        text = ""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = self._opening(item)
            for _ in range(self.config.max_turns):
                if (room := self._room(managed, messages, box)) < 1:
                    break
                reply = await managed.chat_completion(
                    messages=messages,
                    tools=box.schemas or None,
                    max_tokens=room,
                    temperature=temperature,
                    top_p=top_p,
                    split=split,
                )
                choice = reply.choices[0]
                text = choice.message.content or ""
                calls = [call.model_dump() for call in choice.message.tool_calls or []]
                messages = with_reply(messages, text)
                if not calls and (choice.finish_reason == "length" or not self._holds_a_call(text, box)):
                    break
                messages += await self._results(box, messages[-1], calls, self._unread(managed, calls), state)
            sequences = managed.get_state()["nodes"]
        if not sequences:
            limit, whose = self._env_run.conversation_limit
            raise RolloutFailed(f"the prompt alone reaches {limit} tokens, {whose}: raise that, or shorten the prompt")
        if split == "train":
            self._counts.update(rollouts=1, calls=state["tool_calls"], errors=state["tool_errors"])
        return Rollout(text, messages, sequences, state=state)

    async def _toolbox(self, item: Item, state: dict[str, object]) -> Toolbox:
        of_servers = [tool for server in self._mcp for tool in await server.tools()]
        return Toolbox(
            [*listed(self.tools_for(item, state), "tools_for"), *of_servers],
            self.config.tool_timeout,
            self.config.tool_result_limit,
        )

    def _opening(self, item: Item) -> Messages:
        messages = self.conversation(item)
        if messages[-1]["role"] == "assistant":
            raise EnvError("the prompt of a ToolEnv ends with a message of the assistant's: end it with the user's")
        return messages

    def _room(self, managed: "ManagedServer", messages: Messages, box: Toolbox) -> int:
        """Most tokens of the next turn, none where the conversation has come to its limit."""
        length = managed.prompt_length(messages, box.schemas)
        limit, _ = self._env_run.conversation_limit
        return int(min(self.config.max_new_tokens, limit - (length or 0)))

    def _holds_a_call(self, text: str, box: Toolbox) -> bool:
        """Return whether `text`, in which no call was found, was meant to hold one."""
        return bool(box.tools) and any(marker in text.rpartition("</think>")[2] for marker in CALL_MARKERS)

    async def _results(
        self, box: Toolbox, reply: dict[str, object], calls: list[dict[str, Any]], unread: int, state: dict[str, Any]
    ) -> Messages:
        """The messages that answer `reply`, in which its `calls` are noted: in order, since tools may have a state.
        Of `unread` calls beside them the model is told.
        """
        if not calls:
            state["tool_errors"] += 1
            return [{"role": "user", "content": UNREADABLE}]
        made = calls[: self.config.max_tool_calls]
        reply["tool_calls"] = made
        results = []
        for call in made:
            function = call["function"]
            results.append(result := await box.call(function["name"], function["arguments"]))
            self._tell(function["name"], result)
        state["tool_calls"] += len(made)
        state["tool_errors"] += sum(result.error is not None for result in results)
        state["tool_errors"] += (len(made) < len(calls)) + (unread > 0)
        state["last_results"] = results
        texts = [result.text for result in results]
        if len(made) < len(calls):
            texts[-1] += f"\nError: {len(calls)} calls in one message; only the first {len(made)} were made"
        if unread:
            texts[-1] += f"\n{UNREADABLE} ({unread} more in that message)"
        if self.config.tool_role != "tool":
            return [{"role": self.config.tool_role, "content": "\n".join(texts)}]
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in zip(made, texts, strict=True)
        ]

    def _unread(self, managed: object, calls: Sequence[Mapping[str, object]]) -> int:
        """Count the calls of one message that cannot be read, beside `calls`, which can; 0 where a proxy keeps the
        text.
        """
        from atroposlib.envs.server_handling.tool_call_translator import HERMES_FORM, unread_calls  # as in `__init__`

        translator = getattr(managed, "translator", None)
        if translator is None or not calls or self.config.tool_parser not in HERMES_FORM:
            return 0
        text = translator.call_id_to_raw_text.get(calls[0]["id"], "")
        return unread_calls(text.rpartition("</think>")[2])

    def _tell(self, name: str, result: CallResult) -> None:
        """Log what a tool raised, once: its author may not have meant it."""
        if result.raised is not None and (where := origin(result.raised)) not in self._told:
            self._told.add(where)
            log.warning("Tool %s failed, and the model is told so: %s", name, where)

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None:
        """Add the calls, and the errors among them, of a training rollout, on average."""
        counts, self._counts = self._counts, Counter()
        metrics = dict(wandb_metrics or {})
        if rollouts := counts["rollouts"]:
            metrics |= {f"train/tool_{name}": counts[name] / rollouts for name in ("calls", "errors")}
        await super().wandb_log(metrics)

    async def _release(self) -> None:
        await super()._release()
        for server in self._mcp:
            await server.close()
