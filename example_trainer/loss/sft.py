"""Supervised fine-tuning (--offline-objective sft): the likelihood of tokens that others wrote.

    loss  =  -mean over the answers' tokens of log p

It is the policy gradient of an answer with advantage 1 whose sampler was the policy itself. Other losses over whole
answers have the same form, each with a weight of its own for every answer (dpo.py).

Pure functions: values in, values out; tensors are [tokens] and float32.
"""

from torch import Tensor


def token_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """-w log p of each token."""
    return -weights * logprobs
