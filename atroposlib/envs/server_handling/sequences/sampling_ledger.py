"""How each sequence of this process was sampled, for those who post only its tokens.

    sample_tokens ──record──▶ SampledLedger ◀──settings_of── the environment, before it posts a group

An author's group may hold nothing but the lists of a `SequenceNode`, or tokens of `tokens_and_logprobs_completion`.
What a server sampled is found again by the beginning of each stretch of trained tokens.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from atroposlib.envs.server_handling.sequences.sampling import Settings
from atroposlib.wire.batching import NOT_TRAINED

KEPT_COMPLETIONS = 50_000  # the oldest are forgotten; a batch in flight has far fewer
ENTRIES = 6  # of a completion, at most
CONTEXT_TOKENS = 64  # before a completion, which tell apart equal answers to different prompts
KEY_TOKENS = 8  # a completion that an author cuts to fewer is not found again


class _Completion(NamedTuple):
    settings: Settings
    tokens: int


class SampledLedger:
    """Remembers what was sampled lately, and with which settings. Completions to train on count in `settings_of` even
    where they are not found again, as long as all of them had the same settings.
    """

    def __init__(self, kept: int = KEPT_COMPLETIONS) -> None:
        self._kept = kept
        self._completions: OrderedDict[bytes, _Completion] = OrderedDict()
        self._of_training: list[Settings] = []  # each once, two at most

    def record(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        settings: Settings,
        *,
        trained: bool,
    ) -> None:
        """Note a completion of `prompt`; `trained` if it was asked for to train on."""
        completion = _Completion(settings, len(ids))
        for length in {min(len(ids), KEY_TOKENS), min(len(ids) - 1, KEY_TOKENS)} - {0}:  # its last token may be dropped
            for key in _keys(prompt, ids[:length], logprobs[:length]):
                self._completions.pop(key, None)
                self._completions[key] = completion
        while len(self._completions) > ENTRIES * self._kept:
            self._completions.popitem(last=False)
        if trained and settings not in self._of_training and len(self._of_training) < 2:
            self._of_training.append(settings)

    def settings_of(
        self, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None
    ) -> list[Settings]:
        """The different settings with which the trained tokens of a sequence were sampled, as far as known: one, unless
        turns differ; none where nothing is known.
        """
        found: list[Settings] = []
        for start, end in _stretches(masks):
            while start < end:
                length = min(end - start, KEY_TOKENS)
                part = slice(start, start + length)
                keys = _keys(tokens[:start], tokens[part], None if logprobs is None else logprobs[part])
                completion = next((known for key in keys if (known := self._completions.get(key))), None)
                settings = completion.settings if completion else self._only
                if settings is not None and settings not in found:
                    found.append(settings)
                start = start + completion.tokens if completion else end
        return found

    @property
    def _only(self) -> Settings | None:
        return self._of_training[0] if len(self._of_training) == 1 else None


def _keys(prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float] | None) -> Iterator[bytes]:
    """Names of a completion's beginning, the surest first: an author may have changed the prompt, or left out the
    log-probabilities.
    """
    of_ids = np.asarray(ids, dtype="<i8").tobytes()
    context = np.asarray([len(prompt), *prompt[-CONTEXT_TOKENS:]], dtype="<i8").tobytes()
    if logprobs is not None:
        of_logprobs = np.asarray(logprobs, dtype="<f4").tobytes()
        yield _key(of_ids, of_logprobs, context)
        yield _key(of_ids, of_logprobs)
    yield _key(of_ids, b"", context)


def _key(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _stretches(masks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of trained tokens."""
    trained = np.concatenate([[False], np.asarray(masks) != NOT_TRAINED, [False]])
    edges = np.flatnonzero(trained[1:] != trained[:-1]).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)
