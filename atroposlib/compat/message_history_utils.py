"""Shortens long conversations: cuts thoughts and drops old turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.logs import get_logger
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.utils.tokenizers import Tokenizer

log = get_logger(__name__)

OPEN, CLOSE = "<think>", "</think>"
# The system prompt, the last observation and the last reply are always kept.
NEVER_CUT_FROM_END = 2
OF_THE_TOKENS = (
    "inference_logprobs",
    "ref_logprobs",
    "advantages",
    "policy_versions",
    "version_spans",
    "distill_token_ids",
    "distill_logprobs",
    "routed_experts",
)


def strip_thinking(response_text: str) -> str:
    """`response_text` without its first <think> block."""
    before, after = _around_thoughts(response_text)
    return response_text if after is None else before + after


def truncate_thinking(response_text: str, tokenizer: Tokenizer, max_think_tokens: int) -> str:
    """`response_text` with at most the last `max_think_tokens` tokens of its thoughts, from the start of a paragraph
    where one begins.
    """
    before, after = _around_thoughts(response_text)
    if after is None:
        return response_text
    thoughts = response_text[len(before) + len(OPEN) : len(response_text) - len(after) - len(CLOSE)].strip()
    ids = tokenizer.encode(thoughts, add_special_tokens=False)
    if len(ids) > max_think_tokens:
        kept = (
            tokenizer.decode(ids[len(ids) - max_think_tokens :], skip_special_tokens=True)
            if max_think_tokens > 0
            else ""
        )
        thoughts = (kept.partition("\n\n")[2] or kept).strip()
    return f"{before}{OPEN}\n{thoughts}\n{CLOSE}{after}" if thoughts else f"{before}{OPEN}{CLOSE}{after}"


def ensure_trajectory_token_limit(
    trajectory: Sequence[Mapping[str, object]], tokenizer: Tokenizer, max_trajectory_tokens: int
) -> list[Any]:
    """The steps of an episode, each with its alternatives cut to `max_trajectory_tokens`.

    From every alternative of a step the same number of old messages is left out, after the system prompt and in
    pairs where they are pairs, until the longest fits. A step that does not fit without all of them is left out,
    with a log line.
    """
    fitted = [_fitted(step, tokenizer, max_trajectory_tokens, number) for number, step in enumerate(trajectory)]
    return [step for step in fitted if step is not None]


def _fitted(step: Mapping[str, Any], tokenizer: Any, limit: int, number: int) -> Mapping[str, object] | None:
    if max((len(tokens) for tokens in step["tokens"]), default=0) <= limit:
        return step
    messages = [list(alternative) for alternative in step["messages"] or []]
    while messages and all(len(each) - _first_turn(each) > NEVER_CUT_FROM_END for each in messages):
        messages = [_shortened(alternative) for alternative in messages]
        tokenized = [tokenize_for_trainer(tokenizer, alternative) for alternative in messages]
        if max(len(each["tokens"]) for each in tokenized) <= limit:
            # What was sampled for the longer text no longer fits these tokens.
            stale = {key: None for key in OF_THE_TOKENS if step.get(key) is not None}
            return {
                **step,
                **stale,
                "messages": messages,
                "tokens": [each["tokens"] for each in tokenized],
                "masks": [each["masks"] for each in tokenized],
            }
    log.warning(
        "Left out step %d of a trajectory: it does not fit in %d tokens even without its old messages", number, limit
    )
    return None


def _first_turn(messages: Sequence[Any]) -> int:
    return 1 if messages and messages[0]["role"] == "system" else 0


def _shortened(messages: list[Any]) -> list[Any]:
    """Without the oldest turn: two messages if that leaves the last two, else one."""
    start = _first_turn(messages)
    pair = len(messages) - start >= 2 + NEVER_CUT_FROM_END and messages[start + 1]["role"] in ("assistant", "agent")
    return messages[:start] + messages[start + (2 if pair else 1) :]


def _around_thoughts(text: str) -> tuple[str, str | None]:
    """Return what stands before and after the first closed <think> block; None after when there is none."""
    before, opened, rest = text.partition(OPEN)
    _, closed, after = rest.partition(CLOSE)
    return before, after if opened and closed else None
