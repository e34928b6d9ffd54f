"""What /generate takes for a sampling parameter, held against vLLM's own encoder and decoder; and the last check
before the engine.
"""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from atroposlib.wire.typed import WrongValue
from vllm_patching.compat import vllm_requests
from vllm_patching.engines.base import Refused
from vllm_patching.http.sampling import _types, sampling_params

ENCODER, DECODER = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)


def request(params: Any = None, **changes: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = dict(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params or vllm_requests.SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return EngineCoreRequest(**fields | changes)


def decoded(params: Any) -> Any:
    """`params` as the engine process reads them; raises what ends its input thread."""
    return DECODER.decode(ENCODER.encode(request(params))).sampling_params


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("given", "typed"),
    [
        ({"max_tokens": 256.0}, 256),
        ({"seed": 1.0}, 1),
        ({"seed": -(2**63)}, -(2**63)),
        ({"logprobs": 0.0}, 0),
        ({"min_tokens": 2.0}, 2),
        ({"n": 1.0}, 1),
        ({"top_k": 20.0}, 20),
        ({"temperature": 1}, 1.0),
        ({"stop_token_ids": [3.0, 4]}, [3, 4]),
        ({"allowed_token_ids": [3.0, 4]}, [3, 4]),
        ({"logit_bias": {"5": 1, "7": -2.5}}, {5: 1.0, 7: -2.5}),
        ({"stop": "END"}, ["END"]),
        ({"extra_args": {"kept": 1.0}}, {"kept": 1.0}),
    ],
)
def test_what_json_writes_otherwise_becomes_what_the_engine_decodes(given: dict[str, Any], typed: Any) -> None:
    (name,) = given
    value = getattr(decoded(sampling_params(given)), name)
    assert value == typed
    assert type(value) is type(typed)


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 1.5},
        {"max_tokens": "10"},
        {"max_tokens": [1]},
        {"max_tokens": True},
        {"max_tokens": math.nan},
        {"max_tokens": 10**30},
        {"seed": 2**63},
        {"seed": 2**70},
        {"seed": -(2**63) - 1},
        {"seed": "7"},
        {"seed": 0.5},
        {"temperature": "hot"},
        {"temperature": [1]},
        {"temperature": math.inf},
        {"top_p": "1"},
        {"top_k": 1.5},
        {"top_k": 1e300},
        {"logprobs": "1"},
        {"logprobs": True},
        {"prompt_logprobs": 0.5},
        {"min_tokens": "2"},
        {"n": "x"},
        {"n": 1.5},
        {"ignore_eos": "false"},
        {"ignore_eos": 0},
        {"detokenize": "no"},
        {"skip_special_tokens": None, "flat_logprobs": "yes"},
        {"stop": 5},
        {"stop": [5]},
        {"stop": ["\ud800"]},
        {"stop_token_ids": 5},
        {"stop_token_ids": [1.5]},
        {"stop_token_ids": [True]},
        {"bad_words": "abc"},
        {"bad_words": [1]},
        {"allowed_token_ids": "abc"},
        {"allowed_token_ids": [[1]]},
        {"logprob_token_ids": [0.5]},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": "x"}},
        {"logit_bias": {"5": math.nan}},
        {"logit_bias": {"5": 1e9}},
        {"logit_bias": {"1.5": 1}},
        {"extra_args": [1]},
        {"extra_args": {"a": [{"b": 2**70}]}},
        {"extra_args": {"a": nested(500)}},
        {"extra_args": {"kv_transfer_params": "x"}},
        {"structured_outputs": {}},
        {"structured_outputs": "json"},
        {"structured_outputs": {"regex": 5}},
        {"structured_outputs": {"choice": ["a", 1]}},
        {"structured_outputs": {"json": {"maximum": 2**70}}},
        {"structured_outputs": {"regex": "a", "_backend": "x"}},
        {"structured_outputs": {"regex": "a", "regexp": "b"}},
        {"repetition_detection": {"max_pattern_size": 1.5}},
        {"repetition_detection": 3},
        {"thinking_token_budget": 1.5},
        {"trace_decode_token_ids": ["a"]},
        {"stop": nested(500)},
    ],
)
def test_a_value_of_another_type_is_refused_with_name_and_value(given: dict[str, Any]) -> None:
    with pytest.raises(WrongValue) as refused:
        sampling_params(given)
    message, name = str(refused.value), list(given)[-1]
    assert name in message
    assert re.search("[Ee]xpected|must", message)
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 600


@pytest.mark.parametrize(
    "name",
    [
        "max_tokenss",
        "_all_stop_token_ids",
        "_bad_words_token_ids",
        "skip_clone",
        "output_kind",
        "prompt_logprob_token_ids",
        "a\nb\ud800",
    ],
)
def test_a_name_that_is_not_a_clients_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="unknown sampling parameter") as refused:
        sampling_params({name: [1]})
    assert refused.value.status == 422
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "given", [{"temperature": 5}, {"n": 10**9}, {"max_tokens": 0}, {"stop": [""]}, {"top_p": 0}, {"min_p": 2}]
)
def test_a_value_out_of_range_is_refused_with_its_name(given: dict[str, Any]) -> None:
    with pytest.raises(WrongValue, match=next(iter(given))):
        sampling_params(given)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**62, 2**72)
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from(["", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9).map(str), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.sampled_from(sorted(_types())), JSON, min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(FIELDS)
def test_whatever_json_holds_is_refused_or_decoded_by_the_engine_as_it_was_sent(given: dict[str, Any]) -> None:
    try:
        params = sampling_params(given)
    except WrongValue as error:
        line = str(error)
        assert line.isprintable()
    else:
        assert decoded(params) == params


def engine(vocabulary: int = 10, multimodal: bool = False) -> Any:
    kept: list[Any] = []
    model = SimpleNamespace(get_vocab_size=lambda: vocabulary, is_multimodal_model=multimodal)
    return SimpleNamespace(model_config=model, output_processor=SimpleNamespace(add_request=kept.append), kept=kept)


def checked(engine: Any, request: EngineCoreRequest) -> bool:
    """Whether `engine` keeps the request to send it."""
    vllm_requests.refuse_undecodable_requests(engine)
    engine.output_processor.add_request(request)
    return bool(engine.kept == [request])


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_params": vllm_requests.SamplingParams(max_tokens=1.5)},  # type: ignore
        {"sampling_params": vllm_requests.SamplingParams(seed=2**70)},
        {"sampling_params": vllm_requests.SamplingParams(logit_bias={"5": 1.0})},  # type: ignore
        {"sampling_params": vllm_requests.SamplingParams(ignore_eos="false")},  # type: ignore
        {"sampling_params": vllm_requests.SamplingParams(extra_args={"a": {1, 2}, "b": object()})},
        {"priority": 2**70},
        {"priority": 1.5},
        {"cache_salt": 5},
        {"request_id": "\ud800"},
        {"prompt_token_ids": [1.0]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": [10]},
        {"reasoning_parser_kwargs": {"a": 2**70}},
        {"trace_headers": {"a": 5}},
    ],
)
def test_no_route_hands_the_engine_what_it_cannot_decode(changes: dict[str, Any]) -> None:
    found = engine()
    with pytest.raises(vllm_requests.VLLMValidationError, match=r"cannot decode the request|below 10"):
        checked(found, request(**changes))
    assert found.kept == []


def test_a_request_that_the_engine_decodes_goes_on_unchanged() -> None:
    assert checked(engine(), request(vllm_requests.SamplingParams(max_tokens=3)))
    assert checked(engine(multimodal=True), request(prompt_token_ids=[11]))
    assert checked(engine(), request(prompt_token_ids=None))
