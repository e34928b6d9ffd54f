"""The policy's log-probabilities of trained tokens, and their gradients, without ever storing all logits.

    packed row [1, T] ── body ──▶ hidden [T, d] ── rows ──▶ [R, d] ── head, a chunk at a time ──▶ logits [chunk, vocab]

Logits exist only for trained tokens and only one chunk at a time: `accumulate_gradients` differentiates each chunk's
loss before it makes the next chunk's logits, then runs one backward pass through the body. Log-probabilities and
entropies are float32.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from example_trainer.data.packing import MicroBatch
from example_trainer.data.routing_replay import Routing
from vllm_patching.sampling.truncation import without_excluded

ChunkLoss = Callable[..., Tensor]  # of log-probabilities, entropy, chunk, and where a teacher names tokens, Named
See = Callable[[Tensor], None]
DROPPED_PARTS = 8  # of a chunk's rows: finding what is kept takes several buffers of their logits' size
LEAST_REST = 1e-30  # of a probability, so that its logarithm and its inverse are finite in float32


class Named(NamedTuple):
    """What the policy gives the tokens that a teacher names."""

    logprobs: Tensor  # [rows, k]
    rest: Tensor  # [rows], the log of its mass of all others


class _LogprobsAndEntropy(torch.autograd.Function):
    """Fused log-softmax, gather and entropy of logits [rows, vocab]; keeps one buffer of that size for its one
    backward pass. With `named` ids [rows, k], in which an id may be repeated, their log-probabilities too, and the log
    of the mass of all others.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: Tensor, targets: Tensor, named: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        # the sampler's own formula: in the bit-exact mode it gives the sampler's bits
        all_logprobs = logits.log_softmax(-1)
        logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
        of_named = None if named is None else all_logprobs.gather(1, named)
        log_total = logits.gather(1, targets[:, None])[:, 0] - logprobs
        probabilities = all_logprobs.exp_()
        entropy = log_total - torch.linalg.vecdot(probabilities, logits)
        if named is None or of_named is None:
            ctx.save_for_backward(probabilities, targets, entropy)
            return logprobs, entropy
        # a sum of its own: 1 less the named ones would be rounding where they are nearly all
        kept = probabilities.gather(1, named)
        rest = probabilities.scatter_(1, named, 0.0).sum(1).clamp_(min=LEAST_REST)
        probabilities.scatter_(1, named, kept)
        ctx.save_for_backward(probabilities, targets, entropy, named, rest)
        return logprobs, entropy, of_named, rest.log()

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, *grad_named: Tensor
    ) -> tuple[Tensor, None, None]:
        probabilities, targets, entropy, *with_named = ctx.saved_tensors
        of_entropy = None
        if grad_entropy.any():
            of_entropy = (
                torch.xlogy(probabilities, probabilities)
                .addcmul_(probabilities, entropy[:, None])
                .mul_(-grad_entropy[:, None])
            )
        if with_named:
            grad = _with_named(probabilities, grad_logprobs, *with_named, *grad_named)
        else:
            grad = probabilities.mul_(-grad_logprobs[:, None])
        if of_entropy is not None:
            grad.add_(of_entropy)
        return grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None]), None, None


def _with_named(
    probabilities: Tensor, grad_logprobs: Tensor, named: Tensor, rest: Tensor, grad_named: Tensor, grad_rest: Tensor
) -> Tensor:
    """The gradient for the logits, in the buffer of their probabilities, but for the targets' own part. A named token
    has no part of the rest: d rest / d logit is p / r - p of the others, and -p of the named ones.
    """
    factor = -(grad_logprobs + grad_named.sum(1) + grad_rest)[:, None]
    of_named = probabilities.gather(1, named) * factor
    grad = probabilities.mul_(factor + (grad_rest / rest)[:, None])
    return grad.scatter_(1, named, of_named).scatter_add_(1, named, grad_named)


def of_tokens(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    truncation: tuple[Tensor, Tensor] | None = None,
    named: Tensor | None = None,
) -> tuple[Tensor, Tensor, Named | None]:
    """Log-probability of `targets` [rows] and entropy [rows] under the sampler's distribution; logits are [rows,
    vocab]. That is softmax(logits / temperature), and with `truncation` (top-k and top-p, [rows] each) over the kept
    tokens alone.

    Also what the policy gives the tokens `named` by a teacher [rows, k]: of softmax(logits / temperature), since one
    that the sampler's truncation left out would have no log-probability.

    At most three buffers of the logits' size are alive at once, or four with both (memory/plan.py counts on it), so
    float32 logits are changed in place.
    """
    logits = logits.float()
    values = logits.data  # autograd does not watch it; a head's logits may be a view that it refuses to see changed
    if bool((temperatures != 1).any()):
        values.div_(temperatures[:, None])
        if logits.requires_grad:
            logits.register_hook(lambda grad: grad / temperatures[:, None])
    apply = cast(Callable[..., tuple[Tensor, ...]], _LogprobsAndEntropy.apply)
    if truncation is None:
        logprobs, entropy, *of_named = apply(logits, targets, named)
        return logprobs, entropy, Named(*of_named) if of_named else None
    told = None if named is None else Named(*apply(logits, targets, named)[2:])  # keeps no logits
    _drop(values, targets, *truncation)
    logprobs, entropy = apply(logits, targets)
    return logprobs, entropy, told


def _drop(logits: Tensor, targets: Tensor, top_ks: Tensor, top_ps: Tensor) -> None:
    """Take the tokens that top-k and top-p exclude out of the logits, a few rows at a time; never a target, which was
    sampled. Their gradient is 0 as their probability is, so autograd need not know.
    """
    vocabulary = logits.shape[1]
    size = max(1, len(logits) // DROPPED_PARTS)
    top_ks = torch.where(top_ks > 0, top_ks, vocabulary)
    for part, chosen, *given in zip(*(each.split(size) for each in (logits, targets, top_ks, top_ps)), strict=True):
        excluded = without_excluded(part, *given).isneginf().scatter_(1, chosen[:, None], False)
        part.masked_fill_(excluded, torch.finfo(torch.float32).min)


def _of_chunk(
    batch: MicroBatch, logits: Tensor, chunk: slice, named: Tensor | None = None
) -> tuple[Tensor, Tensor, Named | None]:
    truncation = None if batch.truncation is None else (batch.truncation[0][chunk], batch.truncation[1][chunk])
    return of_tokens(logits, batch.targets[chunk], batch.temperatures[chunk], truncation, named)


def trained_hidden(model: PreTrainedModel, batch: MicroBatch, **watched: object) -> Tensor:
    """The last hidden states that predict a trained token, [R, d]. What is `watched` goes to the attention function."""
    output = model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        packed_lengths=batch.lengths,
        packed_parents=batch.parents,
        use_cache=False,
        return_dict=True,
        **watched,
    )
    # a position may predict the next token of several sequences; embedding sums their gradients in a fixed order
    return F.embedding(batch.rows, cast(Tensor, output.last_hidden_state)[0])


def _chunks(rows: int, head: Any, chunk_mb: int) -> Iterator[slice]:
    # as many rows as have `chunk_mb` MiB of float32 logits
    size = max(1, chunk_mb * 2**20 // (4 * head.out_features))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class Policy(nn.Module):
    """The root that every forward pass enters by, body and head alike: FSDP2 gathers weights where modules are called.

    Without FSDP2 it adds nothing to `model`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.routing: Routing | None = None  # of the routers' replay, if the model has experts and is trained

    def forward(
        self, batch: MicroBatch, chunk_mb: int, chunk_loss: ChunkLoss | None = None, see: See | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the trained tokens [R] and None; or, with `chunk_loss`, the hidden states [R, d] and
        the loss's gradient for them, the head's own gradient being added already. `see` gets all log-probabilities [R]
        before the first chunk's loss, by a pass of the head without gradient.
        """
        with nullcontext() if self.routing is None else self.routing.of(batch.routing, counted=batch.counted):
            hidden = trained_hidden(self.model, batch)
        head = self.model.get_output_embeddings()

        def logprobs_of(states: Tensor) -> Tensor:
            chunks = _chunks(len(states), head, chunk_mb)
            return torch.cat([_of_chunk(batch, head(states[chunk]), chunk)[0] for chunk in chunks])

        if chunk_loss is None:
            return logprobs_of(hidden), None
        cut = hidden.detach()
        if see is not None:
            with torch.no_grad():
                see(logprobs_of(cut))
        cut.requires_grad_()
        for chunk in _chunks(len(cut), head, chunk_mb):
            ids = None if batch.teacher_named is None else batch.teacher_named[0][chunk]
            logprobs, entropy, named = _of_chunk(batch, head(cut[chunk]), chunk, ids)
            more = () if named is None else (named,)
            chunk_loss(logprobs, entropy, chunk, *more).backward()
        return hidden, cut.grad

    def logits(self, batch: MicroBatch) -> Tensor:
        """Logits [R, vocabulary] at the batch's rows, in the head's dtype."""
        return cast(Tensor, self.model.get_output_embeddings()(trained_hidden(self.model, batch)))

    def logits_both_ways(self, batch: MicroBatch, windows: set[int | None]) -> tuple[Tensor, Tensor]:
        """Logits of a row's segments as they are trained, packed; and by the model's own forward, each sequence
        alone. The window of each layer's attention, or None, is added to `windows`.
        """
        packed = self.model.get_output_embeddings()(trained_hidden(self.model, batch, packed_windows=windows))
        own = batch.input_ids[0].split(list(batch.lengths))
        begins = batch.position_ids[0, [0, *np.cumsum(batch.lengths)[:-1]]].tolist()
        sequences: list[Tensor] = []
        alone: list[Tensor] = []
        for part, begin, parent in zip(own, begins, batch.parents or (-1,) * len(own), strict=True):
            sequence = part if parent < 0 else torch.cat([sequences[parent], part])
            far = parent < 0 and begin > 0  # it does not begin at position 0
            at = {"position_ids": torch.arange(begin, begin + len(part), device=part.device)[None]} if far else {}
            sequences.append(sequence)
            alone.append(self.model(input_ids=sequence[None], **at).logits[0])
        return packed, torch.cat([logits[-len(part) :] for logits, part in zip(alone, own, strict=True)])


@torch.no_grad()
def token_logprobs(policy: Policy, batch: MicroBatch, chunk_mb: int) -> Tensor:
    """Log-probabilities of the trained tokens, [R], without gradients."""
    return cast(Tensor, policy(batch, chunk_mb)[0])


def accumulate_gradients(
    policy: Policy, batch: MicroBatch, chunk_loss: ChunkLoss, chunk_mb: int, see: See | None = None
) -> None:
    """Add the gradient of the summed `chunk_loss(logprobs, entropy, chunk)` to the parameters' `.grad`.

    `chunk` are the places, among the R trained tokens, of the two [chunk] tensors; the result is a scalar. Where a
    teacher names tokens, what the policy gives them is one more argument. `see` is given the log-probabilities of all R
    before.
    """
    hidden, gradient = policy(batch, chunk_mb, chunk_loss, see)
    hidden.backward(gradient)
