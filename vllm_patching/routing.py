"""The router's choice of experts on CPUs, for `--enable-return-routed-experts`.

vLLM records it in its second model runner alone, which needs Triton. CPUs have the first one, so our worker feeds the
same recorder, vLLM's own `AuxOutputWorkerConnector`, from there. It keeps the rows of each KV block under the block's
hash: a token that the prefix cache supplies has the experts that computed its keys and values.

    begin ──▶ forward, each router writes [tokens, top_k] ──▶ rows_of ──▶ scheduler ──▶ request
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_patching import vllm_types


class RoutingRecorder:
    """Records the experts of each forward step of one worker. Steps do not overlap: vLLM-CPU schedules
    synchronously.
    """

    def __init__(self, connector: vllm_types.RoutingConnector) -> None:
        self._connector = connector
        self._step: Any = None

    def begin(self, step: vllm_types.SchedulerOutput, hashes: object) -> None:
        """Before the forward pass that the scheduler asks for; `hashes` names the blocks of its requests."""
        self._connector.begin_step(hashes)
        self._step = step

    def rows_of(self, runner: vllm_types.ModelRunner, output: vllm_types.ModelRunnerOutput) -> dict[str, object] | None:
        """The experts of the step's tokens, by request, where a token was sampled; None on a rank that does not answer,
        or where nothing ran.
        """
        step, self._step = self._step, None
        if step is None or not output.req_ids:
            return None
        lengths = [step.num_scheduled_tokens[request] for request in output.req_ids]
        pending = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=output.req_ids,
                num_computed_tokens_np=runner.input_batch.num_computed_tokens_cpu[: len(lengths)].copy(),
                query_start_loc_np=np.cumsum([0, *lengths]),
            )
        )
        if pending is None:
            return None
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        rows: dict[str, object] = pending.process_output()
        return rows
