"""What an OpenEnv environment shows, as text for the model. It is the server's text, and not trusted: it is cut to a
length, and can neither end its message nor begin another.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.failures import RolloutFailed

PLACE = re.compile(r"\{(\w+)\}")
HIDDEN = ("metadata",)
BESIDE = ("reward", "done")  # declared in an observation's schema, and sent beside it
EMPTY: tuple[object, ...] = (None, "", [], {})


class Observations:
    """Observations as text: of `fields` alone if there are any, or as `template` has them in the places `{field}`, at
    most `limit` characters.
    """

    def __init__(self, tokenizer: object, fields: Sequence[str], limit: int, template: str = "") -> None:
        self._fields = tuple(fields)
        self._limit = limit
        self._template = template
        self._declared: tuple[str, ...] = ()
        self._special = _pattern_of(special_tokens(tokenizer))

    def declare(self, schema: Mapping[str, object]) -> None:
        """Take the fields from the server's JSON schema of an observation, if it names any."""
        fields = schema.get("properties")
        self._declared = (
            tuple(name for name in fields if name not in HIDDEN + BESIDE) if isinstance(fields, dict) else ()
        )

    def text(self, observation: Mapping[str, object]) -> str:
        """A single field's value alone, several by name: whether a field is named depends on how many the schema
        declares (without one, on how many the observation has), and not on which of them are there or empty. Of a
        tool's reply, its result or its error. Raises RolloutFailed for a template with a place that the observation has
        not.
        """
        if self._template:
            return self.clean(PLACE.sub(lambda place: self._at(place[1], observation), self._template))
        if not self._fields and {"tool_name", "result", "error"} <= observation.keys():
            return self.clean(tool_text(observation))
        shown = (name for name in observation if name not in HIDDEN)
        names = self._fields or tuple(dict.fromkeys([*self._declared, *shown]))
        fields = {name: observation[name] for name in names if observation.get(name) not in EMPTY}
        if len(names) == 1:
            return self.clean(as_text(*fields.values()) if fields else "")
        return self.clean("\n".join(f"{name}: {as_text(value)}" for name, value in fields.items()))

    def _at(self, name: str, observation: Mapping[str, object]) -> str:
        if name not in observation:
            raise RolloutFailed(
                f"--env.observation_template has the place {{{name}}}, and the observation the fields"
                f" {', '.join(observation) or 'none'}",
                "environment",
            )
        value = observation[name]
        return "" if value is None else as_text(value)

    def clean(self, text: str) -> str:
        """`text` cut to the limit, and defused."""
        if (more := len(text) - self._limit) > 0:
            text = f"{text[: self._limit]}\n[{more} more characters are left out]"
        return self.defuse(text)

    def defuse(self, text: str) -> str:
        """`text` without the special tokens of the tokenizer: a space in each makes it plain text."""
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded
        return self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text) if self._special else text


def tool_text(observation: Mapping[str, object]) -> str:
    """Return the text of a tool's reply."""
    error, result = observation["error"], observation["result"]
    if error:
        return f"Error: {as_text(error.get('message', error) if isinstance(error, dict) else error)}"
    if not isinstance(result, dict):
        return as_text(result)
    if result.get("data") is not None:
        return as_text(result["data"])
    content = result.get("content")
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if texts else as_text(result)


def as_text(value: object) -> str:
    """A string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the texts that always are one token to a tokenizer: ends of messages, roles, tool calls."""
    texts = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return sorted((text for text in texts if len(text) > 1 and text.strip()), key=len, reverse=True)


def _pattern_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, texts))) if texts else None
