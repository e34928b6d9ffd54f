"""One group for the page: an entry of the list, and the whole group with every token of its sequences.

    row of samples.jsonl ──┐
    row of trained.jsonl ──┼──▶ rollouts, each with its conversation and its sequences, token by token
    tokenizer ─────────────┘

Everything in a row was written by a model or by somebody else: lists may have other lengths than they should.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from atroposlib.row_files.images import image_of_part, image_url
from atroposlib.view.message_parts import parts_of
from atroposlib.view.run_data.rows import (
    FailedRollout,
    HeldOut,
    Sample,
    Trained,
    decoded,
    finite,
    mean_and_spread,
    of_rollouts,
)
from atroposlib.view.token_text import pieces
from atroposlib.wire.batching import NOT_TRAINED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

QUESTION, ANSWER = 200, 120  # characters in a list
MAX_TOKENS = 200_000  # of one reply: the sequences after that come without their tokens
MAX_FAILED = 1000  # rollouts without a score
MAX_PART = 200  # characters of a message part that is not text
MAX_REWARDS = 20  # named ones of one rollout
MAX_IMAGE_CHARACTERS = 64 << 20  # of one reply: the rollouts after that come without their images


def listed(row: Sample | HeldOut) -> dict[str, Any]:
    """Return what the list shows of a row, beside what the index knows."""
    conversations = _conversations(row)
    first = conversations[0] if conversations else []
    found: dict[str, Any] = {
        "question": _shortened(_question(first), QUESTION),
        "reference": _reference(row.reference),
    }
    if isinstance(row, HeldOut):
        answer = first[-1]["content"] if first and first[-1].get("role") == "assistant" else ""
        return found | {
            "answer": _shortened(answer, ANSWER),
            "index": row.index,
            "outcome": _word(row.outcome),
            "scores": [finite(row.score)],
        }
    scores = [finite(score) for score in of_rollouts(row.scores, row.rollouts)]
    counts: dict[str, int] = {}
    for reason in of_rollouts(row.finish_reasons, row.rollouts):
        counts[str(reason)] = counts.get(str(reason), 0) + 1
    return found | {"scores": scores, "dropped": row.head.dropped, "finish_reasons": counts}


def whole(
    row: Sample, trained: Trained | None, tokenizer: "Tokenizer | None", only: int | None = None
) -> dict[str, Any]:
    """A group. `only` names the one rollout whose tokens are wanted."""
    budget, is_shortened = MAX_TOKENS, False
    rollouts, scores = [], of_rollouts(row.scores, row.rollouts)
    images = _Images(row)
    for number, places in enumerate(_places(row)):
        sequences = []
        for place in places if only in (None, number) else []:
            is_shortened = is_shortened or budget <= 0
            sequence = _sequence(row, trained, place, tokenizer if budget > 0 else None, budget)
            budget -= len(sequence["tokens"])
            sequences.append(sequence)
        last = places[-1]
        rollouts.append(
            {
                "rollout": number,
                "score": finite(scores[number]) if number < len(scores) else None,
                "rewards": _rewards(_at(row.rewards, last)),
                "advantage": _advantage(row, trained, last),
                "failed": None,
                "finish_reason": _at(row.finish_reasons, last),
                "error": None,
                "messages": _conversation(_at(row.messages, last)),
                "images": images.of(last),
                "sequences": sequences,
            }
        )
    rollouts += [_failed(len(rollouts) + number, each) for number, each in enumerate(_failures(row))]
    return {
        "step": None if trained is None else trained.step,
        "left_out": None if trained is None else trained.left_out,
        "sampled_at_step": row.head.step,
        "policy_version": row.head.policy_version,
        "env": row.head.env,
        "group": row.head.group,
        "time": finite(row.head.time),
        "started": finite(row.head.started),
        "reference": _reference(row.reference),
        "dropped": row.head.dropped,
        "generation_params": row.generation_params,
        "error": None,
        "mean": finite(mean_and_spread(scores)[0]),
        "shortened": is_shortened,
        "rollouts": rollouts,
    }


def whole_held_out(row: HeldOut) -> dict[str, Any]:
    """A held-out answer in the form of a group of one."""
    rollout = {
        "rollout": 0,
        "score": finite(row.score),
        "rewards": _rewards(row.rewards),
        "advantage": None,
        "failed": None,
        "finish_reason": _word(row.finish_reason),
        "error": None,
        "messages": _said(row),
        "sequences": [],
    }
    return {
        "step": None,
        "left_out": None,
        "sampled_at_step": None,
        "policy_version": row.policy_version,
        "env": row.env,
        "group": None,
        "index": row.index,
        "outcome": _word(row.outcome),
        "time": finite(row.time),
        "started": None,
        "reference": _reference(row.reference),
        "dropped": None,
        "generation_params": None,
        "error": None,
        "mean": finite(row.score),
        "shortened": False,
        "rollouts": [rollout],
    }


class _Images:
    """The images of each sequence. An entry of a list as long as there are sequences is its own, all else is
    everyone's.
    """

    def __init__(self, row: Sample) -> None:
        self._left = MAX_IMAGE_CHARACTERS
        found = decoded(row.images, object)
        are_own = isinstance(found, list) and len(found) == _count(row)
        self._own: list[object] | None = found if are_own else None
        self._common = _urls(None if are_own else found)

    def of(self, place: int) -> list[str]:
        urls, size = self._common if self._own is None else _urls(self._own[place])
        self._left -= size
        return urls if self._left >= 0 else []


def _urls(images: object) -> tuple[list[str], int]:
    """Those that are images, and their characters."""
    found = [url for each in (images if isinstance(images, list) else [images]) if (url := image_url(each))]
    return found, sum(map(len, found))


def _count(row: Sample) -> int:
    return max(len(row.tokens), len(row.scores), len(row.messages))


def _places(row: Sample) -> list[list[int]]:
    """The sequences of each rollout."""
    count = _count(row)
    if len(row.rollouts) != count:
        return [[place] for place in range(count)]
    found: dict[int, list[int]] = {}
    for place, rollout in enumerate(row.rollouts):
        found.setdefault(rollout, []).append(place)
    return list(found.values())


def _sequence(
    row: Sample, trained: Trained | None, place: int, tokenizer: "Tokenizer | None", budget: int
) -> dict[str, Any]:
    """Token by token; empty lists, with the length, where `budget` tokens were used up before."""
    tokens = _integers(_at(row.tokens, place))
    if budget <= 0:
        return _without_tokens(len(tokens))
    size = len(tokens)
    given = _fit(_integers(_at(row.masks, place)), size, NOT_TRAINED)
    mask = [int(value != NOT_TRAINED) for value in given]
    sampler = [_logprob(value) for value in _fit(_numbers(_at(row.logprobs, place)), size, None)]
    return {
        "length": size,
        "pieces": None if tokenizer is None else pieces(tokenizer, tokens),
        "tokens": tokens,
        "mask": mask,
        "sampler_logprobs": sampler,
        "trainer_logprobs": _spread(_numbers(_at(trained.logprobs if trained else None, place)), mask),
        "versions": _versions(row, place, mask),
    }


def _without_tokens(length: int) -> dict[str, object]:
    lists: dict[str, list[object]] = {
        name: [] for name in ("tokens", "mask", "sampler_logprobs", "trainer_logprobs", "versions")
    }
    return {"length": length, "pieces": None, **lists}


def _spread(values: list[float | None], mask: list[int]) -> list[float | None]:
    """One value per trained token, placed at these tokens. There are fewer for a sequence that was cut; more belong to
    something else.
    """
    left = iter(values if len(values) <= sum(mask) else [])
    return [finite(next(left, None)) if trained else None for trained in mask]


def _versions(row: Sample, place: int, mask: list[int]) -> list[int | None]:
    """The policy version that sampled each token, as far as known."""
    spans = decoded(_at(row.version_spans, place), list[tuple[int, int]])
    if not spans:
        pair = decoded(_at(row.policy_versions, place), tuple[int, int])
        spans = [(0, pair[0])] if pair is not None and pair[0] == pair[1] else []
    found: list[int | None] = [None] * len(mask)
    done = 0  # a span that begins before another's end is somebody else's: each token is looked at once
    for number, (start, version) in enumerate(spans):
        end = min(spans[number + 1][0] if number + 1 < len(spans) else len(mask), len(mask))
        for position in range(max(done, start), end):
            found[position] = version if mask[position] else None
        done = max(done, end)
    return found


def _advantage(row: Sample, trained: Trained | None, place: int) -> float | None:
    """Return the advantage of a sequence: one number, or one per token, of which the first sampled one stands for
    all.
    """
    value = decoded(_at(trained.advantages if trained else None, place), object)
    if isinstance(value, list):
        mask = _fit(_integers(_at(row.masks, place)), len(value), NOT_TRAINED)
        value = next((each for each, sampled in zip(value, mask, strict=True) if sampled != NOT_TRAINED), None)
    return finite(value)


def _rewards(raw: Raw | None) -> str:
    """The named rewards of a rollout: `right 1, brief 0.4`."""
    found = decoded(raw, dict[str, float | None]) or {}
    numbers = [(name, finite(value)) for name, value in list(found.items())[:MAX_REWARDS]]
    return ", ".join(f"{name} {'?' if value is None else f'{value:g}'}" for name, value in numbers)


def _failures(row: Sample) -> list[FailedRollout]:
    """The rollouts without a score: what is known of each, or how many there were by cause."""
    if row.failures:
        return row.failures[:MAX_FAILED]
    each = (FailedRollout(cause) for cause, count in row.failed.items() for _ in range(count))
    return list(islice(each, MAX_FAILED))


def _failed(number: int, failure: FailedRollout) -> dict[str, object]:
    nothing: dict[str, object] = {
        "score": None,
        "rewards": "",
        "advantage": None,
        "finish_reason": None,
        "sequences": [],
    }
    messages = _conversation(failure.messages)
    return {"rollout": number, "failed": failure.cause, "error": failure.error or None, "messages": messages, **nothing}


def _conversations(row: Sample | HeldOut) -> list[list[dict[str, Any]]]:
    """Return the conversations in which the question may stand."""
    if isinstance(row, HeldOut):
        found = _said(row)
        return [found] if found else []
    raws = [*row.messages[:1], row.prompt, *(failure.messages for failure in row.failures[:1])]
    return [found for raw in raws if (found := _conversation(raw))]


def _said(row: HeldOut) -> list[dict[str, object]] | None:
    """The conversation, or what an author gave in its place."""
    found = _conversation(row.messages)
    if found or row.sample is None:
        return found
    return [{"role": "sample", "content": msgspec.json.format(msgspec.json.encode(row.sample)).decode()}]


def _conversation(raw: Raw | None) -> list[dict[str, object]] | None:
    """Messages whose `content` is a string, `parts` what an answer is made of, and `images` those of its parts; null if
    there are none. What else a message has stays as it is.
    """
    value = decoded(raw, object)
    if isinstance(value, str):
        return [{"role": "text", "content": value}]
    if not isinstance(value, list):
        return None
    found = []
    for message in value:
        message = message if isinstance(message, Mapping) else {"role": "text", "content": message}
        given = message.get("content")
        known: dict[str, object] = {"role": str(message.get("role") or "text"), "content": _text(given)}
        known["parts"] = parts_of(str(known["content"])) if known["role"] == "assistant" else None
        images = [url for part in given if (url := image_of_part(part))] if isinstance(given, list) else []
        found.append({**message, **known, **({"images": images} if images or "images" in message else {})})
    return found


def _text(content: object) -> str:
    """A message's text; of parts in the OpenAI chat format, the texts, and what else there is in brackets."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content if not image_of_part(part))
    return msgspec.json.encode(content).decode()


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    size = len(msgspec.json.encode(part))
    return f"[{_shortened(str(kind or 'part'), MAX_PART)}, {size} bytes]"


def _question(messages: Sequence[Mapping[str, object]]) -> str:
    """The last message before the first answer; few-shot examples and instructions come before it."""
    before: list[str] = []
    for message in messages:
        if message["role"] == "assistant" and before:
            break
        before.append(str(message["content"]))
    return before[-1] if before else ""


def _shortened(text: str, most: int) -> str:
    joined = " ".join(text[: 4 * most].split())
    return joined if len(joined) <= most else f"{joined[: most - 1]}…"


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _reference(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _logprob(value: float | None) -> float | None:
    """Null for a token that was not sampled: NO_LOGPROB, which no real one is."""
    found = finite(value)
    return None if found is None or found > 0 else found


def _integers(raw: Raw | None) -> list[int]:
    return decoded(raw, list[int]) or []


def _numbers(raw: Raw | None) -> list[float | None]:
    return decoded(raw, list[float | None]) or []


def _fit(values: list[Any], size: int, filler: object) -> list[Any]:
    return values[:size] + [filler] * (size - len(values))


def _at(values: Sequence[object] | None, place: int) -> Any:
    return values[place] if values is not None and place < len(values) else None
