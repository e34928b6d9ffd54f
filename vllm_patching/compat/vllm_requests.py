"""What vLLM's engine is asked: requests and structured outputs are checked before it reads them."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from vllm import exceptions
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_patching import vllm_types

__all__ = [
    "RequestOutputKind",
    "SamplingParams",
    "VLLMValidationError",
]

# what makes a grammar of a text, in xgrammar's Grammar, and the field of structured outputs that the text is
GRAMMAR_READERS = {
    "from_json_schema": "json",
    "from_regex": "regex",
    "from_ebnf": "grammar",
    "from_lark": "grammar",
    "from_structural_tag": "structural_tag",
}

# A 400 on every route, which vLLM does not take for a malformed tag, and so keeps its message. Its class is newer than
# that of wrong values, with which it is the same class in older releases.
ClientError: type[Exception] = getattr(exceptions, "VLLMClientError", VLLMValidationError)


def vocabulary_size(engine: vllm_types.EngineClient) -> int | None:
    """The model's vocabulary, below which all token ids of a prompt are; None for multimodal models, whose placeholders
    are above it.
    """
    model = engine.model_config
    return None if model.is_multimodal_model else model.get_vocab_size()


def refuse_undecodable_requests(engine: vllm_types.EngineClient) -> None:
    """Make `engine`, vLLM's client of its engine process, refuse each request that the engine could not decode.

    In the engine, one such request ends the thread that reads all requests. So each request is encoded and decoded
    where every route hands it over: in its final form, before any of it is kept. A VLLMValidationError is a 400 on
    every route.
    """
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    vocabulary = vocabulary_size(engine)
    hand_over = engine.output_processor.add_request

    def checked(request: vllm_types.EngineRequest, *arguments: object, **named: object) -> None:
        try:
            # without tensors that vLLM made, which may not travel as MessagePack
            decoder.decode(encoder.encode(msgspec.structs.replace(request, mm_features=None, prompt_embeds=None)))
        except Exception as error:  # any error here would be raised in the engine
            raise VLLMValidationError(
                f"vLLM's engine cannot decode the request: {type(error).__name__}: {error}"
            ) from error
        # vLLM accepts ids that the tokenizer knows and the model does not; their lookup would end the engine
        largest = max(request.prompt_token_ids or [0])
        if vocabulary is not None and largest >= vocabulary:
            raise VLLMValidationError(f"prompt token id {largest} is not below {vocabulary}, the model's vocabulary")
        hand_over(request, *arguments, **named)

    engine.output_processor.add_request = checked


def check_structured_outputs(check: Callable[[Mapping[str, object]], str | None]) -> None:
    """Refuse a request for what `check` finds in its structured outputs, on every route of this process, before vLLM or
    a library reads them: where vLLM makes their record of a request, where it validates sampling parameters, and where
    a parser of tools hands a schema to xgrammar by itself. A second call replaces the first one's check.
    """
    import xgrammar
    from vllm.sampling_params import StructuredOutputsParams

    names = [field.name for field in dataclasses.fields(StructuredOutputsParams) if not field.name.startswith("_")]
    made: Callable[..., None] = getattr(
        StructuredOutputsParams.__post_init__, "__wrapped__", StructuredOutputsParams.__post_init__
    )
    stock = SamplingParams._validate_structured_outputs
    validate: Callable[..., None] = getattr(stock, "__wrapped__", stock)

    def expect(asked: object) -> None:
        if (why := check({name: getattr(asked, name, None) for name in names})) is not None:
            raise ClientError(why)

    @functools.wraps(made)
    def checked_record(self: object) -> None:
        expect(self)
        made(self)

    @functools.wraps(validate)
    def validated(self: vllm_types.SamplingParams, *arguments: object, **named: object) -> None:
        if self.structured_outputs is not None:
            expect(self.structured_outputs)
        validate(self, *arguments, **named)

    cast(Any, StructuredOutputsParams).__post_init__ = checked_record
    cast(Any, SamplingParams)._validate_structured_outputs = validated
    for name, kind in GRAMMAR_READERS.items():
        if (reader := getattr(xgrammar.Grammar, name, None)) is not None:
            setattr(xgrammar.Grammar, name, staticmethod(_checked_reader(reader, kind, check)))


def _checked_reader(
    reader: Callable[..., object], kind: str, check: Callable[[Mapping[str, object]], str | None]
) -> Callable[..., object]:
    read: Callable[..., object] = getattr(reader, "__wrapped__", reader)

    @functools.wraps(read)
    def checked(given: object, *arguments: object, **named: object) -> object:
        if isinstance(given, str | dict) and (why := check({kind: given})) is not None:
            raise ClientError(why)
        return read(given, *arguments, **named)

    return checked


def check_requests(engine: vllm_types.EngineClient, check: Callable[[Mapping[str, object]], Awaitable[None]]) -> None:
    """Await `check`, of the fields of a request's structured outputs, before `engine` validates and takes it. Every
    route that generates calls `engine.generate`.
    """
    stock = engine.generate

    async def generate(
        prompt: object, sampling_params: object, *arguments: object, **named: object
    ) -> AsyncIterator[object]:
        asked = getattr(sampling_params, "structured_outputs", None)
        if asked is not None:
            await check({name: value for name, value in vars(asked).items() if not name.startswith("_")})
        async with contextlib.aclosing(stock(prompt, sampling_params, *arguments, **named)) as outputs:
            async for output in outputs:
                yield output

    engine.generate = generate


def use_xgrammar_alone(args: vllm_types.Arguments) -> None:
    """Make vLLM refuse what xgrammar does not take, instead of handing it to another library. Raises ValueError for a
    server that was told to use another one.
    """
    config = args.structured_outputs_config
    if config.backend not in ("auto", "xgrammar"):
        raise ValueError(
            f"--structured-outputs-config with backend {config.backend}: --structured-outputs checks what xgrammar"
            " compiles; leave the backend out"
        )
    config.backend = "xgrammar"


def compile_structured_output(tokenizer: object, vocabulary: int, fields: dict[str, Any]) -> vllm_types.Grammar:
    """Compile what vLLM's engine compiles for `fields` of structured outputs. Raises what vLLM and xgrammar raise."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    validate_xgrammar_grammar(params)
    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=fields.get("disable_any_whitespace", False)),
        model_config=None,
        speculative_config=None,
    )
    make: Callable[..., object] = partial(
        XgrammarBackend, vocab_size=vocabulary
    )  # a field of its base, in the contract
    backend: Any = make(config, tokenizer=tokenizer)
    asked = params.structured_outputs
    assert asked is not None
    return backend.compile_grammar(*get_structured_output_key(asked))
