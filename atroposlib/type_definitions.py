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
GameHistory = list[Message]
