"""Checks of a group's values: lengths that must agree, ids in the vocabulary."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from atroposlib.api.groups.decoding import RefusedBody, shown
from atroposlib.groups import Untrainable, check, expect_count, expect_lengths, failed_rollouts
from atroposlib.wire.batching import GroupRequirements, PostedData, ScoredData


def flaw(item: bytes, packed: bool, needs: GroupRequirements) -> str | None:
    """Return the reason why the trainer cannot use a stored group, or None."""
    try:
        check((msgspec.msgpack if packed else msgspec.json).decode(item), needs)
    except Untrainable as error:
        return str(error)
    return None


def check_group(data: PostedData, *, max_sequences: int, needs: GroupRequirements) -> list[str]:
    """Raises RefusedBody (422) for what no trainer can use, or what the registered one cannot.

    Returns warnings about lengths that clients are known to get wrong.
    """
    count = len(data.tokens)
    if count == 0:
        raise RefusedBody(422, "a group needs at least one sequence", location=("tokens",), value="[]")
    if (sampled := count + failed_rollouts(data)) > max_sequences:
        raise RefusedBody(
            422,
            f"a group of {sampled} sequences; at most {max_sequences} are accepted (--max-sequences)",
            location=("tokens",) if count > max_sequences else ("failed",),
        )
    lengths = [len(sequence) for sequence in data.tokens]
    kind = "unequal_lengths"
    try:
        expect_count("masks", len(data.masks), count)
        expect_count("scores", len(data.scores), count)
        expect_lengths("masks", [len(mask) for mask in data.masks], lengths)
        for name, values in (("ref_logprobs", data.ref_logprobs), ("inference_logprobs", data.inference_logprobs)):
            if values:  # environments send [] for "none"
                expect_count(name, len(values), count)
                expect_lengths(name, [len(inner) for inner in values], lengths)
        for name in ("policy_versions", "version_spans", "finish_reasons", "routed_experts"):
            if isinstance(entries := getattr(data, name), list):
                expect_count(name, len(entries), count)
        _check_messages(data.messages or [])
        kind = "untrainable"
        check(data, needs)
    except Untrainable as error:
        raise RefusedBody(422, error.message, location=error.where, kind=kind) from None
    return list(_suspicions(data, lengths))


def _check_messages(conversations: Sequence[Sequence[Mapping[str, object]]]) -> None:
    for index, conversation in enumerate(conversations):
        for position, message in enumerate(conversation):
            if "role" not in message or "content" not in message:
                raise RefusedBody(
                    422,
                    "Message must have 'role' and 'content' fields",
                    location=("messages", index, position),
                    value=shown(message),
                )


def _suspicions(data: ScoredData, lengths: Sequence[int]) -> Iterator[str]:
    """Optional fields that do not agree with tokens: passed on, since trainers may not read them."""
    if data.advantages and [len(inner) for inner in data.advantages] != lengths:
        yield "advantages do not have one value per token"
    for name, values in (
        ("messages", data.messages),
        ("overrides", data.overrides),
        ("distill_token_ids", data.distill_token_ids),
        ("distill_logprobs", data.distill_logprobs),
    ):
        if values and len(values) != len(lengths):
            yield f"{name} do not have one entry per sequence"
