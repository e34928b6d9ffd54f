"""The proof by what a server decodes: equal distributions pass, and each kind of fault is named."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from atroposlib.wire.bridge import Decoded, DecodeProbe
from example_trainer.bridges.base import BridgeError
from example_trainer.errors import TrainerError
from example_trainer.loop.decoded import DecodeProof, Seen, moved, rounding_limit

VOCABULARY = 50


def logits(version: int, tokens: list[int]) -> Tensor:
    """A policy that depends on all tokens before, and moves with its version."""
    seed = hash(tuple(tokens)) % 2**31
    at = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return 3 * at + version * 0.01 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed + 1))


class Learner:
    """Computes what `logits` says of its version."""

    version = 0

    def __init__(self) -> None:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))
        self.trained = SimpleNamespace(tokenizer=None, model=SimpleNamespace(config=config))

    def logits(self, sequences: list[list[int]], rows: list[list[int]], dtype: str) -> Tensor:
        places = [(tokens, place) for tokens, of_one in zip(sequences, rows, strict=True) for place in of_one]
        return torch.stack([logits(self.version, tokens[: place + 1]) for tokens, place in places])


class Server:
    """Decodes greedily by the weights of `weights`, and adds `fault` to what its sampler gets."""

    url = "http://a"

    def __init__(self, longest: int | None = None) -> None:
        self.version = self.weights = 0
        self.fault: Callable[[Tensor], Tensor] = lambda row: row
        self.cached = 0
        self.asked: list[DecodeProbe] = []
        self._longest = longest

    def longest(self) -> int | None:
        return self._longest

    def decode(self, probe: DecodeProbe) -> Decoded:
        self.asked.append(probe)
        answers, rows = [], []
        for prompt, steps in zip(probe.prompts, probe.steps, strict=True):
            tokens, of_prompt = list(prompt), []
            for step in range(probe.answer_tokens):
                row = self.fault(logits(self.weights, tokens))
                if step in steps:
                    of_prompt.append(row.numpy().tobytes())
                tokens.append(int(row.argmax()))
            answers.append(tokens[len(prompt) :])
            rows.append(of_prompt)
        return Decoded(self.version, answers, rows, [self.cached] * len(answers))


class Pair:
    """A learner and a server that follows it, unless a test says otherwise."""

    def __init__(self, dtype: str = "float32", *, exact: bool = False, tolerance: float | None = None) -> None:
        learner: Any = Learner()
        self.learner = learner
        self.server = Server()
        self.proof = DecodeProof(learner, [dtype, "float32"], tolerance, exact=exact)

    def prove(self, version: int, weights: int | None = None) -> None:
        self.learner.version = self.server.version = version
        self.server.weights = version if weights is None else weights
        self.proof.begin([self.server], version)
        self.proof.expect()


def test_what_follows_is_proven_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pair = Pair()
    for version in (0, 1, 10):
        pair.prove(version)
    pair.proof.expect()  # nothing was asked since
    assert [len(steps) for probe in pair.server.asked for steps in probe.steps] == [8] * 12
    lengths = [len(prompt) for prompt in pair.server.asked[0].prompts]
    assert sorted(lengths) == lengths
    assert len(set(lengths)) == 4
    assert "moved by 1.00 ± 0.00" in caplog.messages[-1]
    assert caplog.messages[-1].startswith("Parity: vLLM's and the trainer's log-probabilities differ by 0 nats")


def test_weights_of_the_version_before_are_seen_in_float32_by_size() -> None:
    pair = Pair()
    pair.prove(0)
    pair.prove(1)
    with pytest.raises(TrainerError, match=r"policy version 2 at http://a: .* root mean square .* rounding explains"):
        pair.prove(2, weights=1)


def test_a_move_that_did_not_come_is_seen_where_rounding_allows_more_than_the_move() -> None:
    pair = Pair("bfloat16")
    pair.prove(0)
    pair.prove(1)
    with pytest.raises(TrainerError, match=r"since version 1, .* have not moved as the trainer's did \(moved by 0.00"):
        pair.prove(2, weights=1)


def test_a_move_below_rounding_is_not_judged() -> None:
    pair = Pair("bfloat16")
    noise = torch.Generator().manual_seed(0)
    pair.server.fault = lambda row: row + 0.05 * torch.randn(VOCABULARY, generator=noise)
    pair.prove(0)
    pair.prove(1)
    pair.prove(2, weights=1)


def test_rounding_that_was_small_once_by_chance_judges_no_later_move() -> None:
    pair = Pair("bfloat16")
    noise, scale = torch.Generator().manual_seed(0), 0.05
    pair.server.fault = lambda row: row + scale * torch.randn(VOCABULARY, generator=noise)
    for version in (0, 1, 2, 3):
        pair.prove(version)
    scale = 0.001
    pair.prove(4)
    scale = 0.05
    for version in (5, 6, 7):
        pair.prove(version)


def test_one_token_that_is_off_by_one_percent_is_seen() -> None:
    pair = Pair()

    def fault(row: Tensor) -> Tensor:
        row[7] *= 1.01
        return row

    pair.server.fault = fault
    with pytest.raises(TrainerError, match="root mean square"):
        pair.prove(0)


def test_one_bit_is_seen_where_bits_are_promised() -> None:
    pair = Pair(exact=True)
    pair.prove(0)

    def fault(row: Tensor) -> Tensor:
        row[7] = torch.nextafter(row[7], torch.tensor(9.0))
        return row

    pair.server.fault = fault
    with pytest.raises(TrainerError, match=r"same bits \(--batch-invariant\), and 32 of 1600 logits differ"):
        pair.prove(1)


def test_a_prompt_that_the_cache_had_is_a_fault() -> None:
    pair = Pair()
    pair.server.cached = 16
    with pytest.raises(TrainerError, match="version 3 at http://a: 64 tokens of the prompts were in"):
        pair.prove(3)


def test_nan_is_named() -> None:
    pair = Pair()
    pair.server.fault = lambda row: row * torch.nan
    with pytest.raises(TrainerError, match="not finite; look for NaN in the weights"):
        pair.prove(0)


def test_another_version_is_named() -> None:
    pair = Pair()
    pair.proof.begin([pair.server], 4)
    with pytest.raises(TrainerError, match="decoded with policy version 0, not 4"):
        pair.proof.expect()


def test_a_server_that_does_not_answer_is_said_and_judged_no_further(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()

    def silent(probe: DecodeProbe) -> Decoded:
        raise BridgeError("http://a did not answer")

    pair.server.decode = silent  # type: ignore[method-assign]
    pair.prove(0)
    assert caplog.messages[-1] == "Policy version 0 is not probed: http://a did not answer"


def test_a_tolerance_of_ones_own_holds() -> None:
    pair = Pair(tolerance=0.5)
    pair.server.fault = lambda row: row + 0.1 * (torch.arange(VOCABULARY) % 2)
    pair.prove(0)
    strict = Pair(tolerance=0.01)
    strict.server.fault = pair.server.fault
    with pytest.raises(TrainerError, match=r"rounding explains 0.01 \(--parity-tolerance\)"):
        strict.prove(0)


@pytest.mark.parametrize("longest", [2, 5, 40, 100])
def test_a_server_of_short_sequences_gets_short_prompts(longest: int) -> None:
    pair = Pair()
    pair.server = Server(longest)
    pair.prove(0)
    (probe,) = pair.server.asked
    assert max(len(prompt) for prompt in probe.prompts) + probe.answer_tokens <= longest


def test_the_limit_grows_with_the_dtype_and_the_models_own_spread() -> None:
    flat, steep = torch.randn(4, 100), 10 * torch.randn(4, 100)
    assert rounding_limit(["float32", "float32"], flat) < 1e-3
    assert rounding_limit(["float32", "float32"], steep) > 5 * rounding_limit(["float32", "float32"], flat)
    assert rounding_limit(["float32", "bfloat16"], flat) == rounding_limit(["bfloat16", "float32"], flat) > 0.05


def test_rows_of_other_tokens_and_policies_that_stand_still_have_no_share() -> None:
    rows = torch.randn(2, 5)
    here = Seen(0, [(1,), (2,)], [0, 1], rows, rows)
    none = torch.zeros(2)
    assert moved(here, Seen(1, [(3,), (4,)], [0, 1], rows + 1, rows + 1), none) is None
    assert moved(here, here, none) is None
    trained = rows[[1, 0]] + torch.randn(2, 5)
    half = moved(here, Seen(1, [(2,), (9,)], [1, 1], (rows[[1, 0]] + trained) / 2, trained), none)
    assert half is not None
    assert len(half.shares) == 1  # of the row whose tokens are those of before
