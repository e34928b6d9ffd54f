"""The proof that vLLM samples from the policy that was trained: by what it decodes, not by the weights that it has.

    after a sync: prompts ──▶ each server answers, beside all else ──▶ logits of its sampler at some steps
    before the next update: the trainer's logits after the same tokens ──▶ compared

Decoding has faults of its own that neither a digest of the weights nor a prompt's log-probabilities show: captured
graphs that read old buffers, a KV cache kept over an update, an adapter of the version before.

Two checks. The distributions may differ by rounding alone. And between two probes they must have moved as the
trainer's did, which tells a small update from none where rounding is coarser than the update.
"""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor

from atroposlib import rounding
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import Decoded, DecodeProbe
from example_trainer.bridges.base import BridgeError, Decodes
from example_trainer.errors import TrainerError
from example_trainer.loop.learner import Learner
from example_trainer.weights.written import TrainedModel

log = get_logger(__name__)

ANSWER_TOKENS = 32
PROMPT_TOKENS = (1, 8, 24, 136)  # the last fills a block of vLLM's prefix cache, of 128 tokens on CPUs
PROMPTS = (  # no two begin alike: none may find another's blocks in that cache
    "The",
    "What is 12 plus 30? It is",
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n    ordered = sorted(values)\n",
    "A lighthouse stands on a cliff above the bay. Its keeper climbs one hundred and forty steps each evening, trims"
    " the wick, winds the clockwork that turns the lens, and writes the weather into a book. Ships far out at sea count"
    " the seconds between two flashes and so know which light they see. In winter the wind is so strong that the door"
    " cannot be opened, and then he stays upstairs with bread, tea and a radio. Once, in a storm, a gull flew against"
    " the glass. He mended its wing with a splint of two matches, fed it on herring for three weeks, and let it go on a"
    " still morning. It came back every autumn after that, he says, and sat on the rail until the lamp was lit. When he"
    " retired, an engineer came with a box of switches, and since then the lamp lights itself when the sun has set.",
)
STEPS = (1, 4, 8, 13, 17, 22, 26, 31)  # of each answer, from 0, which prefill computes

WRONG_MOVE = 0.5  # of the trainer's own move between two probes, by which a server's is wrong beyond rounding
NOISE_DIMENSIONS = 2  # few, as rounding is nearly alike after one prompt's tokens
STANDARD_ERRORS = 4.0


@dataclass(frozen=True)
class Seen:
    """What one server's sampler had in a probe, and the trainer's own of the same tokens; logits [rows, vocabulary]."""

    version: int
    contexts: list[tuple[int, ...]]  # of each row: all tokens that it was computed from
    prompts: list[int]  # of each row: the place of its prompt
    served: Tensor
    trained: Tensor

    def difference(self) -> Tensor:
        """Served less trained log-probabilities, float64 [rows, vocabulary]."""
        return _logprobs(self.served) - _logprobs(self.trained)

    def noise(self) -> Tensor:
        """The mean square of the difference's length after each prompt, [prompts]."""
        squares, prompts = self.difference().square().sum(-1), torch.tensor(self.prompts)
        return torch.stack([squares[prompts == prompt].mean() for prompt in prompts.unique()])


def rounding_limit(dtypes: Sequence[str], trained: Tensor) -> float:
    """Return how far log-probabilities of one policy may be apart, in nats, root mean square, by the rounding of the
    coarsest of `dtypes`, where the trainer's logits are `trained`, [rows, vocabulary].
    """
    return rounding.rounding_limit(dtypes, float(_logprobs(trained).std(dim=-1).mean()))


class Moved(NamedTuple):
    """Which share of the trainer's move between two probes a server made, 1 if it serves what was trained, and the
    standard error that rounding makes: after each prompt.
    """

    shares: Tensor
    errors: Tensor

    def wrong(self) -> bool:
        """Return whether rounding does not explain it."""
        return bool(((self.shares - 1).abs() - STANDARD_ERRORS * self.errors > WRONG_MOVE).any())

    def __str__(self) -> str:
        each = ", ".join(f"{share:.2f} ± {error:.2f}" for share, error in zip(self.shares, self.errors, strict=True))
        return f"moved by {each} of the trainer's moves"


def moved(before: Seen, now: Seen, noise: Tensor) -> Moved | None:
    """Compare a server's move between two probes with the trainer's, prompt by prompt, and over all. None without rows
    of the same tokens, or without a move.

    A share is the projection of one move on the other. Rounding is that of the probe before, and no less than it
    usually is after that prompt (`noise` [prompts]), as it may be small by chance; it is taken as noise in
    `NOISE_DIMENSIONS` independent directions.
    """
    places = {tokens: row for row, tokens in enumerate(before.contexts)}
    pairs = [(row, places[tokens]) for row, tokens in enumerate(now.contexts) if tokens in places]
    if not pairs:
        return None
    rows, earlier = (torch.tensor(side) for side in zip(*pairs, strict=True))
    ours = _logprobs(now.trained[rows]) - _logprobs(before.trained[earlier])
    theirs = _logprobs(now.served[rows]) - _logprobs(before.served[earlier])
    size, along = ours.square().sum(-1), (ours * theirs).sum(-1)
    groups = torch.tensor(now.prompts)[rows]
    rounded = torch.maximum(before.difference()[earlier].square().sum(-1), noise[groups])
    variance = 2 * rounded * size / NOISE_DIMENSIONS  # of `along`
    masks = [groups == group for group in groups.unique()]
    sums = torch.tensor([[float(each[mask].sum()) for each in (size, along, variance)] for mask in masks])
    if not sums[:, 0].min() > 0:
        return None
    return Moved(sums[:, 1] / sums[:, 0], sums[:, 2].sqrt() / sums[:, 0])


class DecodeProof:
    """Probes of one run. `begin` has the servers answer in the background; `expect` compares, before the weights change
    again. `dtypes` are those in which server and trainer compute, in this order; `exact`: their bits are equal.
    """

    def __init__(self, learner: Learner, dtypes: Sequence[str], tolerance: float | None, *, exact: bool) -> None:
        self._learner = learner
        self._dtypes = dtypes
        self._served_dtype = dtypes[0]
        self._tolerance = tolerance
        self._exact = exact
        self._texts = _texts(learner.trained)
        self._salt = secrets.token_hex(16)  # that no one else's request looks like an old KV cache
        self._asked: dict[str, tuple[DecodeProbe, Future[Decoded]]] = {}
        self._before: dict[str, Seen] = {}
        self._noise: dict[str, list[Tensor]] = {}  # of the probes so far
        self._version = 0

    def begin(self, servers: Sequence[Decodes], version: int) -> None:
        """Have each server answer, which serves `version` now; returns at once."""
        self._version = version
        for server in servers:
            try:
                probe = self._probe(server.longest())
            except BridgeError as error:
                log.warning("Policy version %d is not probed at %s: %s", version, server.url, error)
                continue
            answer: Future[Decoded] = Future()
            Thread(target=_fill, args=(answer, partial(server.decode, probe)), name="DecodeProof", daemon=True).start()
            self._asked[server.url] = (probe, answer)

    def expect(self) -> None:
        """Raise TrainerError if what a server decoded is not the trainer's policy, which is still that of `begin`."""
        asked, self._asked = self._asked, {}
        for url, (probe, answer) in asked.items():
            start = time.perf_counter()
            try:
                decoded = answer.result()
            except BridgeError as error:
                log.warning("Policy version %d is not probed: %s", self._version, error)
                continue
            if decoded.policy_version != self._version:
                raise TrainerError(
                    f"Decode probe: {url} decoded with policy version {decoded.policy_version}, not {self._version}"
                )
            self._compare(url, probe, decoded, start)

    def _probe(self, longest: int | None) -> DecodeProbe:
        """The same prompts for every probe; shorter ones for a server of short sequences."""
        answer = ANSWER_TOKENS if longest is None else min(ANSWER_TOKENS, longest - 1)
        room = max(PROMPT_TOKENS) if longest is None else longest - answer
        prompts = [tokens[: min(length, room)] for tokens, length in zip(self._texts, PROMPT_TOKENS, strict=True)]
        steps = [step for step in STEPS if step < answer] or [0]
        return DecodeProbe(prompts, answer, [steps] * len(prompts), self._salt)

    def _seen(self, probe: DecodeProbe, decoded: Decoded) -> Seen:
        """The server's logits beside the trainer's after the same tokens."""
        sequences = [prompt + answer for prompt, answer in zip(probe.prompts, decoded.token_ids, strict=True)]
        rows = [
            [len(prompt) + step - 1 for step in steps] for prompt, steps in zip(probe.prompts, probe.steps, strict=True)
        ]
        served = torch.stack([_row(each) for of_one in decoded.logits for each in of_one])
        trained = self._learner.logits(sequences, rows, self._served_dtype)
        width = min(served.shape[1], trained.shape[1])  # either may be padded
        contexts = [
            tuple(tokens[: place + 1]) for tokens, places in zip(sequences, rows, strict=True) for place in places
        ]
        prompts = [prompt for prompt, places in enumerate(rows) for _ in places]
        return Seen(decoded.policy_version, contexts, prompts, served[:, :width], trained[:, :width])

    def _compare(self, url: str, probe: DecodeProbe, decoded: Decoded, start: float) -> None:
        compared_at = time.perf_counter()
        seen = self._seen(probe, decoded)
        difference = seen.difference()
        rms, worst = float(difference.square().mean().sqrt()), float(difference.abs().max())
        limit = self._tolerance or rounding_limit(self._dtypes, seen.trained)
        where = f"Decode probe of policy version {seen.version} at {url}"
        if not math.isfinite(rms):
            raise TrainerError(f"{where}: log-probabilities are not finite; look for NaN in the weights")
        unequal = int((_bits(seen.served) != _bits(seen.trained)).sum())
        if self._exact and unequal:
            raise TrainerError(
                f"{where}: vLLM and the trainer promise the same bits (--batch-invariant), and {unequal} of"
                f" {seen.served.numel()} logits differ, by at most {worst:.3g} nats: {REMEDY}"
            )
        if not rms <= limit:
            raise TrainerError(
                f"{where}: what vLLM decodes differs from what was trained by {rms:.3g} nats, root mean square over"
                f" {len(difference)} distributions; rounding explains {limit:.3g} (--parity-tolerance): {REMEDY}"
            )
        if cached := sum(decoded.cached_tokens):
            raise TrainerError(
                f"{where}: {cached} tokens of the prompts were in the server's prefix cache, so that their keys and"
                f" values are those of a version before: {REMEDY}"
            )
        before, self._before[url] = self._before.get(url), seen
        share = None
        if before is not None and before.version < seen.version:
            share = moved(before, seen, torch.stack(self._noise[url]).mean(0))
        self._noise.setdefault(url, []).append(seen.noise())
        if before is not None and share is not None and share.wrong():
            raise TrainerError(
                f"{where}: since version {before.version}, distributions have not moved as the trainer's did ({share}):"
                f" {REMEDY}"
            )
        log.info(
            "Parity: vLLM's and the trainer's log-probabilities differ by %.2g nats, root mean square (limit %.2g), in"
            " %d distributions that %s decoded with policy version %d%s; waited %.2f s, compared in %.2f s",
            rms,
            limit,
            len(difference),
            url,
            seen.version,
            "" if share is None else f", and {share}",
            compared_at - start,
            time.perf_counter() - compared_at,
        )


REMEDY = (
    "it decodes with other weights, an old KV cache or other kernels than it should. Start the vLLM server again,"
    " without captured graphs (--enforce-eager) if that helps, and report it"
)


def _fill(answer: Future[Decoded], act: Callable[[], Decoded]) -> None:
    """Run `act` in a thread that a run which ends does not wait for."""
    try:
        answer.set_result(act())
    except Exception as error:
        answer.set_exception(error)  # raised where it is waited for


def _texts(trained: TrainedModel) -> list[list[int]]:
    """Token ids of the prompts; random ones for a model without a tokenizer, or with one of few words."""
    vocabulary = int(trained.model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in PROMPT_TOKENS]
    if trained.tokenizer is not None:
        read = [trained.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
        if all(len(ids) >= length and max(ids) < vocabulary for ids, length in zip(read, PROMPT_TOKENS, strict=True)):
            return read
    return texts


def _row(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.float32)


def _logprobs(logits: Tensor) -> Tensor:
    # not by log_softmax, in whose place a batch-invariant run on a GPU puts a kernel for float32 alone
    wide = logits.double()
    return wide - wide.logsumexp(-1, keepdim=True)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)
