"""Does vLLM serve what the trainer has? Asked after the first sync, and after the first sync of an update."""

import time

from atroposlib.logs import get_logger
from example_trainer.bridges import WeightBridge
from example_trainer.bridges.vllm_client import vllm_clients
from example_trainer.errors import TrainerError
from example_trainer.model.rotary import HasTextConfig, expect_length, length_limit
from example_trainer.settings.config import TrainerConfig

# nats on a fixed prompt; rounding of the served precision stays well below, another model's weights are above
PARITY_LIMITS = {"float32": 0.05, "float16": 0.1, "bfloat16": 0.25}

log = get_logger(__name__)


def expect_served_lengths(config: TrainerConfig, model: HasTextConfig) -> None:
    """Raise ModelError if a vLLM server computes every token with another rotary table than the trainer, because it
    serves longer sequences than the model was made for.
    """
    if config.bridge.external or length_limit(model) is None:
        return
    for client in vllm_clients(config):
        if (served := client.status().max_model_len) is not None:
            expect_length(model, served, f"--max-model-len of the vLLM server at {client.url}")


def compared_dtypes(bridge: WeightBridge, config: TrainerConfig, kernels: str) -> list[str]:
    """Return in which dtypes vLLM and the trainer compute, whose matrices `kernels` multiply: the coarsest explains how
    far they may be apart.
    """
    return [bridge.served_dtype, "bfloat16" if "bfloat16" in (kernels, config.compute_dtype) else "float32"]


def check_served(bridge: WeightBridge, policy_version: int, config: TrainerConfig, kernels: str) -> None:
    """Raise TrainerError if vLLM computes with other weights than the trainer's, whose matrices `kernels` multiply: by
    their words, and where it does not show what it decodes, by the log-probabilities of a fixed prompt.
    """
    start = time.perf_counter()
    differing = bridge.differing_tensors(policy_version)
    if differing:
        raise TrainerError(
            f"{len(differing)} of the tensors that vLLM computes with are not the trainer's right after the sync of"
            f" policy version {policy_version}, among them {differing[0]}: start the vLLM server again, and report it"
        )
    if differing is not None:
        log.info(
            "Digest: every word of vLLM's weights is the trainer's, policy version %d (%.2f s)",
            policy_version,
            time.perf_counter() - start,
        )
    if bridge.decoders():  # which show more (decoded.py)
        return
    difference = bridge.parity_probe()
    limit = config.parity_tolerance or max(PARITY_LIMITS[dtype] for dtype in compared_dtypes(bridge, config, kernels))
    if not difference <= limit:
        raise TrainerError(
            f"vLLM's log-probabilities differ from the trainer's by {difference:.3g} nats (root mean square) right"
            f" after a sync (--parity-tolerance {limit}): it serves another model, or at a precision that needs a "
            "higher tolerance"
        )
    log.info(
        "Parity: vLLM's and the trainer's log-probabilities differ by %.2g nats, root mean square (limit %g)",
        difference,
        limit,
    )
