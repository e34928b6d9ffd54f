"""`Judge`: another model that scores answers. It is asked through any server with OpenAI's API.

    values ──template──▶ prompt ──▶ judge's server ──▶ reply ──read──▶ number ──scale──▶ score, 0 to 1

The score is None if the judge is unreachable or too slow after its retries, if its reply has no number, or if the
number is off the scale. An error that it would repeat, such as a wrong key, ends the environment if the judge has never
answered. The settings are flags of an environment whose configuration has a field of `JudgeConfig`:
`--env.judge.base_url`.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping

from pydantic import Field, field_validator

from atroposlib.config import Config
from atroposlib.envs.errors import EnvError, PeerError, WrongSetting
from atroposlib.envs.limits.time_limit import time_limit
from atroposlib.envs.server_handling.errors import PermanentServerError, ServerError
from atroposlib.envs.server_handling.reasoning import Effort, ReasoningConfig
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.grading.extraction import extract_tagged
from atroposlib.logs import get_logger

log = get_logger(__name__)

FAILURES_TOLD_EVERY_S = 60.0
SHOWN_CHARS = 200
READ_TIMES = 64
WINDOW_CHARS = 1024
PLACE = re.compile(r"\{(\w+)\}")

Read = Callable[[str], float | None]


class JudgeConfig(Config):
    """Settings of a judge."""

    base_url: str = Field(default="", description="Address of the judge's server, e.g. http://localhost:9100/v1.")
    model: str = Field(default="", description="Its name at that server.")
    api_key_variable: str | None = Field(
        default=None, description="The environment variable that holds the server's API key; no key if unset."
    )
    concurrency: int = Field(default=16, ge=1, description="Requests in flight.")
    timeout: float = Field(
        default=120.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for one score, retries included; waiting for its turn does not count.",
    )
    max_tokens: int = Field(default=1024, ge=1, description="Tokens of one reply.")
    temperature: float = Field(default=0.0, ge=0, description="Temperature.")
    reasoning_effort: Effort | None = Field(default=None, description="Reasoning effort, for a model that takes one.")

    @field_validator("base_url")
    @classmethod
    def _has_scheme(cls, base_url: str) -> str:
        if base_url and not base_url.startswith(("http://", "https://")):
            raise ValueError("expected http://HOST:PORT/v1 or https://...")
        return base_url

    @property
    def api_key(self) -> str:
        """The key. Raises EnvError if the variable has none."""
        if self.api_key_variable is None:
            return ""
        if key := os.environ.get(self.api_key_variable):
            return key
        raise WrongSetting(
            f"{self.api_key_variable} (--env.judge.api_key_variable) is not set: export the judge's API key"
        )


def tagged(tag: str = "score") -> Read:
    """Reads the number in the last <score>...</score> of a reply."""
    return lambda reply: as_number(extract_tagged(reply, tag))


def json_field(name: str = "score") -> Read:
    """Reads the number `name` of the last JSON object in a reply that has one."""
    return lambda reply: next(
        (as_number(verdict[name]) for verdict in reversed(_json_objects(reply)) if name in verdict), None
    )


def matched(pattern: str) -> Read:
    """Reads the number that the first group of a regular expression matches, the last time that it does."""
    compiled = re.compile(pattern)
    if not compiled.groups:
        raise ValueError(f"the pattern {pattern!r} has no group around the number, such as ([0-9]+)")
    return lambda reply: as_number(next(iter([match[1] for match in compiled.finditer(reply)][-1:]), None))


class Judge:
    """Asks `config`'s model for scores. Raises EnvError for a config that names no judge.

    `template` is the prompt, with a place `{name}` for each value that `score` gets; other braces stay. `read` finds
    the number in a reply, or gives None. `scale` is the worst number and the best one, which become 0 and 1.
    """

    def __init__(
        self, config: JudgeConfig, template: str, read: Read | None = None, scale: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        from atroposlib.envs.server_handling.openai_server import OpenAIServer  # `--help` does not need its client

        if not (config.base_url and config.model):
            raise EnvError(
                "no judge is named: pass --env.judge.base_url http://HOST:PORT/v1 and --env.judge.model NAME"
            )
        if scale[0] == scale[1]:
            raise ValueError(f"the worst and the best number of the scale {scale} are the same")
        self._config, self._template, self._read, self._scale = config, template, read or tagged(), scale
        server = APIServerConfig(
            base_url=config.base_url,
            model_name=config.model,
            api_key=config.api_key,
            timeout=math.ceil(config.timeout),
            num_max_requests_at_once=config.concurrency,
            health_check=False,
        )
        self._server = OpenAIServer(server, ReasoningConfig(effort=config.reasoning_effort))
        self._has_answered = False
        self._failed = 0  # since the log was told
        self._told_at = -math.inf

    async def score(self, **values: object) -> float | None:
        """The judge's score of what the template asks about: 0 to 1, or None. A list of messages is shown as text.

        Raises ValueError for a value that has no place in the template, PeerError for a judge that cannot answer.
        """
        reply = await self._reply(filled(self._template, values))
        if reply is None:
            return None
        worst, best = self._scale
        number = self._read(reply)
        if number is None or not min(worst, best) <= number <= max(worst, best):
            told = "no number" if number is None else f"{number:g}, which is off the scale from {worst:g} to {best:g},"
            self._note_failure(f"its reply has {told}: {' '.join(reply[-SHOWN_CHARS:].split())!r}")
            return None
        return (number - worst) / (best - worst)

    async def close(self) -> None:
        """Close its connections."""
        await self._server.close()

    async def _reply(self, prompt: str) -> str | None:
        try:
            async with time_limit(self._config.timeout):
                reply = await self._server.chat_completion(
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=self._config.max_tokens,
                    temperature=self._config.temperature,
                )
        except TimeoutError:
            self._note_failure(f"no reply within {self._config.timeout:g} s (--env.judge.timeout)")
            return None
        except PermanentServerError as error:
            if not self._has_answered:
                raise PeerError(f"the judge cannot answer: {error}; correct --env.judge.*") from error
            self._note_failure(str(error))
            return None
        except ServerError as error:
            self._note_failure(str(error))
            return None
        self._has_answered = True
        return reply.choices[0].message.content or ""

    def _note_failure(self, reason: str) -> None:
        """Log at most one line a minute."""
        self._failed += 1
        if time.monotonic() - self._told_at >= FAILURES_TOLD_EVERY_S:
            log.warning("The judge gave no score for %d answers, the last because %s", self._failed, reason)
            self._failed, self._told_at = 0, time.monotonic()


def filled(template: str, values: Mapping[str, object]) -> str:
    """`template` with the values in their places. Raises ValueError for one without a place."""
    places = set(PLACE.findall(template))
    if missing := [name for name in values if name not in places]:
        raise ValueError(f"the judge's template has no {{{missing[0]}}}; it has {', '.join(sorted(places)) or 'none'}")
    return PLACE.sub(lambda place: as_text(values[place[1]]) if place[1] in values else place[0], template)


def as_text(value: object) -> str:
    """A value for a prompt: a list of messages is one paragraph each."""
    if isinstance(value, (list, tuple)) and all(isinstance(each, dict) and "role" in each for each in value):
        return "\n\n".join(f"{each['role']}: {each.get('content') or ''}" for each in value)
    return str(value)


def as_number(value: object) -> float | None:
    """A finite number, also one in a string, or None."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _json_objects(text: str) -> list[dict[str, object]]:
    """The outermost JSON objects in `text`, from the left. Reading stops where it has read many times its length."""
    decoder, objects, read = json.JSONDecoder(), [], 0
    window, offset = text, 0  # an error counts the lines before it, so that each would cost as much as all before
    start = text.find("{")
    while start >= 0 and read <= READ_TIMES * len(text):
        if start - offset > WINDOW_CHARS:
            window, offset = text[start:], start
        end = start + 1
        try:
            value, stop = decoder.raw_decode(window, start - offset)
        except json.JSONDecodeError as error:
            read += error.pos + offset - start
        except (ValueError, RecursionError):  # a number of thousands of digits, or deeper than any answer
            read += WINDOW_CHARS
        else:
            objects.append(value)
            end = stop + offset
        start = text.find("{", end)
    return objects
