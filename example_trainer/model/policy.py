"""The policy's log-probabilities of trained tokens, and their gradients, without ever storing all logits.

    packed row [1, T] ── body ──▶ hidden [T, d] ── rows ──▶ [R, d] ── head, a chunk at a time ──▶ logits [chunk, vocab]

Logits exist only for trained tokens and only one chunk at a time: `accumulate_gradients` differentiates each chunk's
loss before it makes the next chunk's logits, then runs one backward pass through the body. Log-probabilities and
entropies are float32.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from example_trainer.data.packing import MicroBatch
from example_trainer.data.routing_replay import Routing

ChunkLoss = Callable[[Tensor, Tensor, slice], Tensor]
See = Callable[[Tensor], None]


class _LogprobsAndEntropy(torch.autograd.Function):
    """Fused log-softmax, gather and entropy of logits [rows, vocab]; keeps one buffer of that size for its one
    backward pass.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # the sampler's own formula: in the bit-exact mode it gives the sampler's bits
        all_logprobs = logits.log_softmax(-1)
        logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
        log_total = logits.gather(1, targets[:, None])[:, 0] - logprobs
        probabilities = all_logprobs.exp_()
        entropy = log_total - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(probabilities, targets, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None]:
        probabilities, targets, entropy = ctx.saved_tensors
        if grad_entropy.any():
            of_entropy = (
                torch.xlogy(probabilities, probabilities)
                .addcmul_(probabilities, entropy[:, None])
                .mul_(-grad_entropy[:, None])
            )
            grad = probabilities.mul_(-grad_logprobs[:, None]).add_(of_entropy)
        else:
            grad = probabilities.mul_(-grad_logprobs[:, None])
        return grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None]), None


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperatures: Tensor, truncation: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` [rows] and entropy [rows] under the sampler's distribution; logits are [rows,
    vocab].

    That is softmax(logits / temperature), and with `truncation` (top-k and top-p, [rows] each) over the kept tokens
    alone.
    """
    logits = logits.float()
    if bool((temperatures != 1).any()):
        logits = logits / temperatures[:, None]
    if truncation is not None:
        logits = logits.masked_fill(_dropped(logits, targets, *truncation), torch.finfo(torch.float32).min)
    return cast(tuple[Tensor, Tensor], _LogprobsAndEntropy.apply(logits, targets))


@torch.no_grad()
def _dropped(logits: Tensor, targets: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Mark which tokens top-k and then top-p exclude, [rows, vocab], by vLLM's own order of operations. Never a
    target: it was sampled.
    """
    vocabulary = logits.shape[1]
    values, order = logits.sort(-1)
    kept = torch.where(top_ks > 0, top_ks.clamp(max=vocabulary), vocabulary)
    values.masked_fill_(values < values.gather(1, (vocabulary - kept)[:, None]), -torch.inf)
    excluded = values.softmax(-1).cumsum(-1) <= 1 - top_ps[:, None]
    excluded |= values.isneginf()
    excluded[:, -1] = False
    return torch.empty_like(excluded).scatter_(1, order, excluded).scatter_(1, targets[:, None], False)


def _of_chunk(batch: MicroBatch, logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    truncation = None if batch.truncation is None else (batch.truncation[0][chunk], batch.truncation[1][chunk])
    return logprobs_and_entropy(logits, batch.targets[chunk], batch.temperatures[chunk], truncation)


def trained_hidden(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The last hidden states that predict a trained token, [R, d]."""
    output = model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        packed_lengths=batch.lengths,
        packed_parents=batch.parents,
        use_cache=False,
        return_dict=True,
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
            logprobs, entropy = _of_chunk(batch, head(cut[chunk]), chunk)
            chunk_loss(logprobs, entropy, chunk).backward()
        return hidden, cut.grad

    def logits_both_ways(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logits of a row's segments as they are trained, packed; and by the model's own forward, each sequence
        alone.
        """
        packed = self.model.get_output_embeddings()(trained_hidden(self.model, batch))
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

    `chunk` are the places, among the R trained tokens, of the two [chunk] tensors; the result is a scalar. `see` is
    given the log-probabilities of all R before.
    """
    hidden, gradient = policy(batch, chunk_mb, chunk_loss, see)
    hidden.backward(gradient)
