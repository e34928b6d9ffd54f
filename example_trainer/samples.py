"""Sampled answers as text, for people to look at."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from atroposlib.wire.batching import NOT_TRAINED, ScoredData


@dataclass(frozen=True)
class Sample:
    """What a model was given, all that followed, and what that earned."""

    prompt: str
    answer: str
    reward: float


def samples_of(group: ScoredData, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The sequences of a group; an answer begins at the first sampled token, and later turns belong to it."""
    samples = []
    for tokens, masks, score in zip(group.tokens, group.masks, group.scores, strict=True):
        start = next((place for place, mask in enumerate(masks) if mask != NOT_TRAINED), len(tokens))
        prompt, answer = tokenizer.decode(tokens[:start]), tokenizer.decode(tokens[start:])
        samples.append(Sample(str(prompt), str(answer), float(score)))
    return samples
