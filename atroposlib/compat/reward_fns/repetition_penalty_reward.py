"""A penalty for saying the same again."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward

WEIGHTS = {"paragraph": 0.4, "sentence": 0.3, "word": 0.1, "phrase": 0.2}
STOPWORDS = frozenset(
    "a an and are as at be but by for from if in is it its of on or that the then this to was we with".split()
)
PHRASE_WORDS = 4


@register_reward
class RepetitionPenaltyReward(BaseReward):
    """-1 to 0: 0 for text that repeats nothing; a text too short to tell costs `short_text_penalty`.

    The weighted share of repeated paragraphs, sentences, words (without `stopwords`, beyond a third) and phrases of
    four words counts from `threshold` on. A repeated paragraph costs at least `paragraph_repetition_base_penalty`.
    """

    def __init__(
        self,
        threshold: float = 0.05,
        min_words: int = 10,
        min_sentences: int = 2,
        short_text_penalty: float = -0.1,
        paragraph_repetition_base_penalty: float = -0.6,
        component_weights: Mapping[str, float] | None = None,
        stopwords: set[str] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight, **kwargs)
        self.threshold = threshold
        self.min_words = min_words
        self.min_sentences = min_sentences
        self.short_text_penalty = short_text_penalty
        self.paragraph_repetition_base_penalty = paragraph_repetition_base_penalty
        self.component_weights = {**WEIGHTS, **(component_weights or {})}
        self.stopwords = STOPWORDS if stopwords is None else stopwords

    def score(self, completion: str, **kwargs: object) -> float:
        words = re.findall(r"\w+", completion.lower())
        sentences = _parts(r"(?<=[.!?])\s", completion)
        if len(words) < self.min_words or len(sentences) < self.min_sentences:
            return self.short_text_penalty
        shares = {
            "paragraph": _repeated(_parts(r"\n\s*\n", completion)),
            "sentence": _repeated(sentences),
            "word": max(0.0, 1.5 * _repeated([word for word in words if word not in self.stopwords]) - 0.5),
            "phrase": _repeated(
                [tuple(words[start : start + PHRASE_WORDS]) for start in range(len(words) - PHRASE_WORDS + 1)]
            ),
        }
        repetition = sum(self.component_weights[name] * share for name, share in shares.items())
        penalty = -repetition if repetition > self.threshold else 0.0
        return max(-1.0, min(penalty, self.paragraph_repetition_base_penalty) if shares["paragraph"] else penalty)


def _parts(separator: str, text: str) -> list[str]:
    return [" ".join(part.lower().split()).rstrip(".!?") for part in re.split(separator, text) if part.strip()]


def _repeated(parts: Sequence[object]) -> float:
    """The share of `parts` that have been there before."""
    return 1 - len(Counter(parts)) / len(parts) if parts else 0.0
