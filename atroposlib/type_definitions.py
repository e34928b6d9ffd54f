"""Types that environments share by import: the item of a dataset, a number, a chat message and its histories."""

from typing import Any, Literal, NotRequired, TypedDict

number = int | float

# What `get_next_item` returns is the environment's own business.
Item = Any

# Text, or the list of typed parts (text, image) of the OpenAI chat format.
Content = str | list[dict[str, Any]]


class Message(TypedDict):
    """One message of a conversation in the OpenAI chat format, with an optional reward for that message alone."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    reward: NotRequired[float | None]


MessageHistory = list[Message]
# The same as templates and servers take it, with whatever keys a tokenizer knows.
Messages = list[dict[str, Any]]


class AgentStep(TypedDict, total=False):
    """One step of an agent: its messages and the reward for them."""

    step: int
    messages: list[Message]
    reward: float


# Steps by the agent's name.
AgentHistory = dict[str, list[AgentStep]]


class Observation(TypedDict):
    """Holds what an agent sees: the data, and the same as a model is shown it."""

    raw: dict[str, Any]
    rendered: Content


class GameStep(TypedDict):
    """One move of a game: who saw what, did what, and with which result (a reward, or one by agent)."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


GameHistory = list[GameStep]
