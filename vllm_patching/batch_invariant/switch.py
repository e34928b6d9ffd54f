"""The environment variables that must be set before vLLM is imported. Used by the launcher, by vLLM's plugin and by the
trainer.

vLLM starts several processes itself: only the environment reaches all of them.
"""

import os
from collections.abc import MutableMapping

from atroposlib.errors import AtroposError

SWITCH = "ATROPOS_BATCH_INVARIANT"
# CPU: the attention kernel must not split a context by the number of threads. CUDA: vLLM's own mode, and the model
# runner whose sampler computes log-probabilities by torch's log_softmax of logits over the temperature.
CPU_VARIABLES = {SWITCH: "1", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
CUDA_VARIABLES = {SWITCH: "1", "VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}


class NotInvariant(AtroposError):
    """This process, machine or model cannot compute batch-invariantly; the message says why and what to do."""


def switch_on(environment: MutableMapping[str, str], *, cpu: bool) -> None:
    """Set the variables. Raises NotInvariant if one has another value."""
    if cpu and environment.get("VLLM_BATCH_INVARIANT", "0") != "0":
        raise NotInvariant("VLLM_BATCH_INVARIANT=1 selects Triton kernels, which vLLM cannot run on CPUs: unset it")
    for name, value in (CPU_VARIABLES if cpu else CUDA_VARIABLES).items():
        if environment.setdefault(name, value) != value:
            raise NotInvariant(
                f"{name}={environment[name]} contradicts --batch-invariant, which needs {name}={value}: unset it"
            )


def is_on() -> bool:
    """Return whether this process was started batch-invariant. Raises NotInvariant if only some of the variables are
    set.
    """
    if os.environ.get(SWITCH) != "1":
        return False
    if not any(variables.items() <= os.environ.items() for variables in (CPU_VARIABLES, CUDA_VARIABLES)):
        raise NotInvariant(
            f"{SWITCH}=1 without VLLM_CPU_ATTN_SPLIT_KV=0 (CPU) or VLLM_BATCH_INVARIANT=1 and"
            " VLLM_USE_V2_MODEL_RUNNER=0 (CUDA): start vLLM with example_trainer/vllm_api_server.py --batch-invariant,"
            " which sets all of them"
        )
    return True
