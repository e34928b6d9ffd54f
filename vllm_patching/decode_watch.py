"""What a worker's model really computes for chosen requests while it decodes: the logits that its sampler was given.

    watch(requests) ──▶ begin(step) ──▶ model.compute_logits ──▶ see ──▶ end(output) ──▶ taken()

A trainer compares them with its own (http/decode.py). They come out of the same forward passes, captured graphs, KV
cache and batch as every sampled token, which a prompt's log-probabilities do not. Nothing is copied while no request is
watched.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vllm_patching import vllm_types


class Watched(NamedTuple):
    """A request whose logits are kept: those that predict its answer's tokens `steps`, counted from 0."""

    prompt_tokens: int
    steps: tuple[int, ...]


class DecodeWatch:
    """Keeps logits of one worker's watched requests. Steps do not overlap where logits are computed."""

    def __init__(self, model: Any) -> None:
        self._requests: dict[str, Watched] = {}  # by the id that they were sent with, which vLLM may extend
        self._rows: dict[tuple[str, int], torch.Tensor] = {}
        self._due: dict[str, tuple[str, int]] = {}  # engine's id -> id and step, of the forward pass under way
        self._logits: torch.Tensor | None = None
        self._compute = model.compute_logits
        model.compute_logits = self._see

    def watch(self, requests: Mapping[str, Watched]) -> None:
        """Keep the logits of these requests from now on, and forget those of earlier ones."""
        self._requests, self._rows = dict(requests), {}

    def begin(self, step: vllm_types.SchedulerOutput) -> None:
        """Before the forward pass that the scheduler asks for: find which of its rows are to be kept."""
        self._due, self._logits = {}, None
        if not self._requests:
            return
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for engine_id, tokens in step.num_scheduled_tokens.items():
            sent = next((sent for sent in self._requests if engine_id.startswith(sent)), None)
            if sent is None:
                continue
            prompt, steps = self._requests[sent]
            predicts = computed[engine_id] + tokens - prompt
            if predicts in steps:
                self._due[engine_id] = (sent, predicts)

    def end(self, output: object) -> None:
        """After the pass was sampled from: keep what was due. `output` may be one that is still being copied to the
        host.
        """
        due, logits, self._due, self._logits = self._due, self._logits, {}, None
        if not due or output is None or logits is None:
            return
        inner = getattr(output, "_model_runner_output", None) or getattr(output, "model_runner_output", output)
        sampled: vllm_types.ModelRunnerOutput = inner
        if len(logits) != len(sampled.req_ids):  # drafts are verified: a request has several rows
            return
        for row, engine_id in enumerate(sampled.req_ids):
            if engine_id in due:
                self._rows[due[engine_id]] = logits[row]

    def taken(self) -> dict[str, list[bytes]]:
        """Return the rows of each request, float32 [vocabulary] each, in the order of its steps; forget them all.
        Nothing on a rank that computes no logits. Raises RuntimeError where a row is missing.
        """
        requests, rows = self._requests, self._rows
        self._requests, self._rows = {}, {}
        if not rows:
            return {}
        missing = [(sent, step) for sent, (_, steps) in requests.items() for step in steps if (sent, step) not in rows]
        if missing:
            raise RuntimeError(f"{len(missing)} of the watched steps were not seen, among them {missing[0]}")
        return {
            sent: [rows[sent, step].float().cpu().numpy().tobytes() for step in steps]
            for sent, (_, steps) in requests.items()
        }

    def _see(self, *args: object, **kwargs: object) -> torch.Tensor | None:
        """Compute logits as the model does, and keep a copy if they are the step's first and one of them is due. Later
        ones are of prompts' tokens.
        """
        logits: torch.Tensor | None = self._compute(*args, **kwargs)
        if self._due and self._logits is None and logits is not None:
            self._logits = logits.clone()  # samplers write into them
        return logits
