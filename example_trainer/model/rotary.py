"""Up to which length a model's rotary embedding is the same for every sequence, and the refusal of longer ones.

Some types choose their frequencies by the longest sequence of a forward pass. In a packed row, a short sequence beside
a long one would then be computed with the long one's table, whereas vLLM has one table for all of them: `longrope`
takes the long one for every token as soon as --max-model-len exceeds the original length, and `dynamic` never changes
its own. Up to that length all agree. Every way to load a model for training asks here.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from example_trainer.errors import ModelError

ORIGINAL = "original_max_position_embeddings"
WHOLE = "max_position_embeddings"


class LengthLimit(NamedTuple):
    """The longest sequence for which a rotary type has one table, and the name of that figure in config.json."""

    rope_type: str
    tokens: int
    named: str


class HasTextConfig(Protocol):
    """A model's configuration as transformers read it."""

    model_type: ClassVar[str]

    def get_text_config(self) -> object: ...


def length_limit(config: HasTextConfig) -> LengthLimit | None:
    """The lowest limit among a model's layers; None if no frequency depends on a length."""
    text = config.get_text_config()
    layers = _of_layers(getattr(text, "rope_parameters", None))
    limits = [limit for parameters in layers if (limit := _limit(text, parameters))]
    return min(limits, key=lambda limit: limit.tokens, default=None)


def original_length(config: object) -> int | None:
    """The least length that a rotary embedding was made for before it was stretched, if config.json has one."""
    layers = _of_layers(getattr(config, "rope_parameters", None))
    return min((int(each[ORIGINAL]) for each in layers if each.get(ORIGINAL)), default=None)


def _of_layers(parameters: object) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of the whole model, or of each type of its layers."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
        return
    for each in parameters.values():
        yield from _of_layers(each)


def _limit(config: object, parameters: Mapping[str, Any]) -> LengthLimit | None:
    rope_type = str(parameters["rope_type"])
    whole = int(getattr(config, WHOLE, 0) or 0)
    original = int(parameters.get(ORIGINAL) or getattr(config, ORIGINAL, None) or whole)
    if rope_type == "longrope":
        return LengthLimit(rope_type, original, ORIGINAL)
    if "dynamic" not in rope_type:
        return None
    if "alpha" not in parameters and original < whole:
        # vLLM stretches the table for every token, transformers only beyond `whole`: no length is the same for both
        return LengthLimit(rope_type, 0, ORIGINAL)
    return LengthLimit(rope_type, whole, WHOLE)


def expect_length(config: HasTextConfig, longest: int | None, what: str = "--seq-len") -> None:
    """Raise ModelError if sequences of up to `longest` tokens (`what` says so; None: as many as the model takes) would
    be trained with another rotary table than vLLM samples with.
    """
    limit = length_limit(config)
    if limit is None:
        return
    whole = int(getattr(config.get_text_config(), WHOLE, 0) or 0)
    tokens, named = (whole, WHOLE) if longest is None else (longest, what)
    if tokens <= limit.tokens:
        return
    kind = f"{config.model_type}, whose rotary embedding is of type {limit.rope_type!r},"
    if not limit.tokens:
        raise ModelError(
            f"{kind} cannot be trained: vLLM stretches its frequencies by {ORIGINAL} for every token, transformers only"
            f" beyond {WHOLE} {whole}; set rope_type 'yarn', 'linear' or 'default' in config.json, for vLLM, too, or"
            " choose another model"
        )
    raise ModelError(
        f"{kind} can be trained with sequences of up to {limit.tokens} tokens ({limit.named} in config.json), and"
        f" {named} is {tokens}: beyond that the frequencies of every token depend on the longest sequence in its row,"
        f" and in vLLM on --max-model-len; give the trainer --seq-len {limit.tokens} and vLLM --max-model-len"
        f" {limit.tokens}, or less"
    )
