"""The parity probe: trainer and vLLM score the same fixed prompt, which shows whether vLLM serves the trainer's
weights. All bridges use it."""

import torch

from example_trainer.bridges.vllm_client import ScoresPrompts
from example_trainer.weights.written import TrainedModel

PROBE_TOKENS = 48


def parity(trained: TrainedModel, server: ScoresPrompts) -> float:
    """Root mean square of the differences between the log-probabilities of the prompt's tokens, in nats.

    Not the largest: of 47 float32 differences that one is rounding, and varies threefold from prompt to prompt
    (docs/bridges.md).
    """
    tokens = torch.randint(
        trained.model.config.get_text_config().vocab_size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    served = torch.tensor(server.prompt_logprobs(tokens), dtype=torch.float64)
    return float((trained.prompt_logprobs(tokens).double() - served).square().mean().sqrt())
