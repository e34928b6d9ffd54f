"""The proof that vLLM serves the trainer's weights: both score one fixed prompt. Shared by all bridges."""

import torch
from transformers import PreTrainedModel

from example_trainer.bridges.vllm_client import VllmClient

PROBE_TOKENS = 48


@torch.no_grad()
def parity(model: PreTrainedModel, vllm: VllmClient) -> float:
    """Root mean square of the differences between the log-probabilities of the prompt's tokens, in nats.

    Not the largest: of 47 float32 differences that one is rounding, and varies threefold from prompt to prompt
    (docs/bridges.md).
    """
    tokens = torch.randint(
        model.config.get_text_config().vocab_size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    served = torch.tensor(vllm.prompt_logprobs(tokens), dtype=torch.float64)
    ids = torch.tensor([tokens], device=model.device)
    was_training = model.training
    model.eval()  # no dropout of an adapter, as in vLLM
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    model.train(was_training)
    ours = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()
    return float((ours - served).square().mean().sqrt())
