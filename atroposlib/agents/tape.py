"""What servers replied during one call of the model, so that the call can be repeated without them.

    recording(tape): ManagedServer ──▶ TapedRoute ──▶ vLLM        each reply goes onto the tape
    playing(tape):   ManagedServer ──▶ TapedRoute                 each reply comes from the tape, in the same order

A session of a killed endpoint is made again by playing the tapes of its turns to a new ManagedServer: the same code
makes the same sequences, and no text is tokenised that was not tokenised then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from atroposlib.envs.server_handling.dispatching.dispatch import Split
from atroposlib.envs.server_handling.sequences.sampling import SampledTokens
from atroposlib.envs.server_handling.server_manager import StickyRoute

Parsed = tuple[str, list[tuple[str, str]]]


@dataclass
class Tape:
    """The sampled tokens of a call, and what a parser of vLLM's found in them."""

    sampled: list[SampledTokens] = field(default_factory=list)
    parsed: list[Parsed] = field(default_factory=list)


_recording: ContextVar[Tape | None] = ContextVar("recording", default=None)
_playing: ContextVar[Tape | None] = ContextVar("playing", default=None)


class TapedRoute(StickyRoute):
    """A route to the manager's servers that records and plays tapes."""

    async def sample_tokens(self, *, split: Split = "train", **arguments: object) -> SampledTokens:
        """As `InferenceCalls.sample_tokens`."""
        if (played := _playing.get()) is not None:
            return played.sampled.pop(0)
        sampled = await super().sample_tokens(split=split, **arguments)
        if (tape := _recording.get()) is not None:
            tape.sampled.append(sampled)
        return sampled

    async def parse_tool_calls(
        self, *, text: str, tools: Sequence[object], parser: str | None = None, split: Split = "train"
    ) -> Parsed:
        """As `InferenceCalls.parse_tool_calls`."""
        if (played := _playing.get()) is not None:
            return played.parsed.pop(0)
        parsed = await super().parse_tool_calls(text=text, tools=tools, parser=parser, split=split)
        if (tape := _recording.get()) is not None:
            tape.parsed.append(parsed)
        return parsed


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Record the calls that are made inside."""
    token = _recording.set(tape)
    try:
        yield
    finally:
        _recording.reset(token)


@contextmanager
def playing(tape: Tape) -> Iterator[None]:
    """Answer the calls that are made inside from a copy of `tape`."""
    token = _playing.set(Tape([*tape.sampled], [*tape.parsed]))
    try:
        yield
    finally:
        _playing.reset(token)
