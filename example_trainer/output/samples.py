"""Sampled answers as text, for people to read."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from atroposlib.groups import rollouts_of
from atroposlib.wire.batching import NOT_TRAINED, ScoredData

NEXT_SEQUENCE = "\n\n[the same rollout continues with another prompt]\n\n"


@dataclass(frozen=True)
class Sample:
    """Holds what a model was given, all that followed, and what that earned."""

    prompt: str
    answer: str
    reward: float


def samples_of(group: ScoredData, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The rollouts of a group. An answer begins at the first sampled token of a rollout; later turns and sequences
    belong to it.
    """
    samples: list[Sample] = []
    for rollout, tokens, masks, score in zip(rollouts_of(group), group.tokens, group.masks, group.scores, strict=True):
        if rollout < len(samples):
            earlier = samples[rollout]
            samples[rollout] = replace(earlier, answer=f"{earlier.answer}{NEXT_SEQUENCE}{tokenizer.decode(tokens)}")
            continue
        start = next((place for place, mask in enumerate(masks) if mask != NOT_TRAINED), len(tokens))
        prompt, answer = tokenizer.decode(tokens[:start]), tokenizer.decode(tokens[start:])
        samples.append(Sample(str(prompt), str(answer), float(score)))
    return samples
