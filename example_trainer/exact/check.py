"""The check of every step: does each trained token have the sampler's log-probability, bit for bit?

    loss/batch_gradients.py ──(token, sampler's, ours) a chunk──▶ Comparison ──▶ judge: metrics, summary, table, stop

With --batch-invariant the answer must be yes for every token sampled under the policy being trained; `--bit-exact
strict` stops the run at the first step where it is not and keeps that step's batch and weights for `python -m
example_trainer.replay`. Without it the same numbers are metrics, and a batch with a mean difference above
--mismatch-limit is a bad one (`bad_data.py`): it makes no update, and several in a row stop a run that has gone
wrong.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from atroposlib.logs import get_logger, put, say
from example_trainer.bridges.vllm_client import vllm_clients
from example_trainer.data.batching import Batch, Sequence
from example_trainer.errors import BadBatch, TrainerError
from example_trainer.ranks.ranks import Ranks
from example_trainer.settings.config import TrainerConfig

log = get_logger(__name__)

# nats between the log-probabilities of one policy, on average over a step, that the coarser side's rounding explains
ROUNDING = {"float32": 0.01, "bfloat16": 0.2}
WARN_AGAIN_AFTER = 50  # steps

ROWS_SHOWN = 20


class NotExact(TrainerError):
    """Trainer and sampler disagree more than the configuration allows."""


class Mismatch(NotExact, BadBatch):
    """A batch whose log-probabilities are plainly another model's."""


class Comparison:
    """Sampler's and trainer's log-probabilities of one step's trained tokens. Tensors added are [tokens], float32. The
    sampler's are NaN where they are not known: such tokens are kept in their places, and not compared.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, tokens: Tensor, sampler: Tensor, ours: Tensor) -> None:
        """One chunk, in the order in which the step computes."""
        self._parts.append((tokens, sampler, ours.detach()))

    @classmethod
    def joined(cls, comparisons: Iterable["Comparison"]) -> "Comparison":
        """Several of one step as one."""
        whole = cls()
        whole._parts = [part for comparison in comparisons for part in comparison._parts]
        return whole

    def of_all(self, ranks: Ranks) -> "Comparison":
        """The same of every rank's tokens."""
        if ranks.size == 1:
            return self
        whole, nothing = Comparison(), (torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0))
        columns = self.columns() if self._parts and ranks.counts else nothing
        tokens, sampler, ours = (ranks.rows(column) for column in columns)
        whole.add(tokens, sampler, ours)
        return whole

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, sampler's and trainer's values of all chunks, on the CPU; they are put together once."""
        if len(self._parts) > 1 or self._parts[0][0].device.type != "cpu":
            tokens, sampler, ours = (torch.cat(column).cpu() for column in zip(*self._parts, strict=True))
            self._parts = [(tokens, sampler, ours)]
        return self._parts[0]

    def compared(self) -> tuple[Tensor, Tensor, Tensor]:
        """The columns of the tokens whose sampler's log-probability is known; empty ones before any was added."""
        if not self._parts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0)
        tokens, sampler, ours = self.columns()
        known = ~sampler.isnan()
        return (tokens, sampler, ours) if known.all() else (tokens[known], sampler[known], ours[known])

    def row(self) -> dict[str, float | int]:
        """The numbers of a metrics row, the counts alone where nothing was compared; `max_abs_diff` is computed in
        float64.
        """
        _, sampler, ours = self.compared()
        if not len(ours):
            return {"bit_exact/differing_tokens": 0, "bit_exact/tokens": 0}
        differing = int((bits(ours) != bits(sampler)).sum())
        return {
            "bit_exact/differing_tokens": differing,
            "bit_exact/tokens": len(ours),
            "bit_exact/max_abs_diff": (ours.double() - sampler.double()).abs().max().item(),
            "ratio_tokens_different": differing / len(ours),
        }

    def mean_difference(self) -> float:
        """Mean |difference| over the tokens, in nats; 0 without any."""
        _, sampler, ours = self.compared()
        if not len(ours):
            return 0.0
        return (ours - sampler).abs().mean().item()

    def table(self) -> str:
        """The first differing tokens: place in the step, id, both values, both in hex, difference."""
        tokens, sampler, ours = self.compared()
        wrong = (bits(ours) != bits(sampler)).nonzero()[:, 0]
        lines = [f"{'token':>8} {'id':>8} {'sampler':>16} {'trainer':>16} {'hex':>9} {'hex':>9} {'difference':>12}"]
        for at in wrong[:ROWS_SHOWN].tolist():
            a, b = sampler[at], ours[at]
            lines.append(
                f"{at:>8} {int(tokens[at]):>8} {a.item():>16.10f} {b.item():>16.10f} {hexadecimal(a):>9}"
                f" {hexadecimal(b):>9} {(b.double() - a.double()).item():>12.3e}"
            )
        if len(wrong) > ROWS_SHOWN:
            lines.append(f"… and {len(wrong) - ROWS_SHOWN} more")
        return "\n".join(lines)


def bits(values: Tensor) -> Tensor:
    """The bit patterns of float32 values, so that equal means equal."""
    return values.contiguous().view(torch.int32)


def hexadecimal(value: Tensor) -> str:
    """One float32's bit pattern, e.g. bf206a7e."""
    return f"{int(bits(value.reshape(1))) & 0xFFFFFFFF:08x}"


def summary(row: dict[str, float | int]) -> str:
    """Return `Bitwise identical: True · 0 / 4096 tokens differ`; of no tokens that nothing was compared."""
    differing, tokens = row["bit_exact/differing_tokens"], row["bit_exact/tokens"]
    verdict = "nothing to compare" if tokens == 0 else differing == 0
    return f"Bitwise identical: {verdict} · {differing} / {tokens} tokens differ"


@dataclass(frozen=True)
class Served:
    """Describes how vLLM computes: dtype and tensor-parallel ranks."""

    dtype: str
    tp_size: int


class Exactness:
    """The configured check of one run. `served` is how its server computes with --batch-invariant, which the learner
    has to follow; None without. `mismatch` tells of the last Mismatch as long as no batch has agreed with the sampler,
    also before a resume; None once one has. Raises TrainerError if the server does not compute as configured.
    """

    def __init__(self, config: TrainerConfig, served_dtype: str, kernels: str, mismatch: str | None = "") -> None:
        self._config = config
        self.served: Served | None = None
        self.mismatch = mismatch
        coarse = "bfloat16" in (kernels, config.compute_dtype) or served_dtype != "float32"
        self._rounding = ROUNDING["bfloat16" if coarse else "float32"]
        self._warned_at: int | None = None  # the step
        if not config.batch_invariant:
            return
        ranks = set()
        for client in vllm_clients(config):
            status = client.status()
            if not status.batch_invariant:
                raise TrainerError(
                    f"--batch-invariant: the vLLM server at {client.url} was started without it; "
                    "restart example_trainer/vllm_api_server.py with --batch-invariant, or drop the flag here"
                )
            ranks.add(status.tp_size)
        if len(ranks) > 1:
            raise TrainerError(
                f"--batch-invariant: the vLLM servers run over {sorted(ranks)} ranks; give all one"
                " --tensor-parallel-size"
            )
        self.served = Served(served_dtype, ranks.pop())
        log.info("Computing as vLLM does, %s: log-probabilities must agree bit for bit", self.served)

    def judge(self, comparison: Comparison, step: int, batch: Batch, model: PreTrainedModel) -> dict[str, float | int]:
        """The step's metrics; in the exact mode prints summary and table.

        Raises NotExact where the configuration says to stop, Mismatch above its limit.
        """
        if self.served is not None and model.device.type == "cuda":
            _refuse_truncation(batch, step)
        row = comparison.row()
        if self.served is not None:
            say(summary(row))
            if row["bit_exact/differing_tokens"]:
                put(comparison.table())
                if self._config.bit_exact == "strict":
                    behind = (
                        f" The batch was sampled {batch.staleness_mean:.2f} policy versions ago: exactness needs"
                        " on-policy batches."
                        if batch.staleness_mean
                        else ""
                    )
                    raise NotExact(
                        f"step {step}: {row['bit_exact/differing_tokens']} of {row['bit_exact/tokens']} tokens differ"
                        f" (--bit-exact strict), by at most {row['bit_exact/max_abs_diff']:.3g}.{behind} Kept for:"
                        f" python -m example_trainer.replay {self._keep(self.served, step, batch, model)}"
                    )
        mean = comparison.mean_difference()
        if mean > self._config.mismatch_limit:
            error = Mismatch(
                f"step {step}: the trainer's log-probabilities differ from the sampler's by {mean:.3g} nats on average"
                f" (--mismatch-limit {self._config.mismatch_limit}): vLLM serves other weights, or samples under "
                "settings that the batch does not report"
            )
            self.mismatch = None if self.mismatch is None else str(error)
            raise error
        self._warn_of_more_than_rounding(mean, step, batch)
        if row["bit_exact/tokens"] > 0:
            self.mismatch = None
        return row

    def _warn_of_more_than_rounding(self, mean: float, step: int, batch: Batch) -> None:
        """The same policy, sampled from the distribution that the batch names, differs by rounding alone."""
        if batch.staleness_max != 0 or mean <= self._rounding:
            return
        if self._warned_at is not None and step < self._warned_at + WARN_AGAIN_AFTER:
            return
        self._warned_at = step
        log.warning(
            "Step %d: the sampler's log-probabilities differ from the trainer's by %.3g nats on average at staleness 0"
            " (logprob_diff_mean); rounding explains up to %g. Usual causes: the environment sampled with a"
            " temperature, top_p or top_k that its groups do not report, or changed the tokens or the prompt;"
            " vLLM serves other weights",
            step,
            mean,
            self._rounding,
        )

    def expect_agreement(self) -> None:
        """At the end of a run: raise its last Mismatch if no batch agreed with the sampler."""
        if self.mismatch:
            raise Mismatch(self.mismatch)

    def _keep(self, served: Served, step: int, batch: Batch, model: PreTrainedModel) -> Path:
        folder = self._config.log_dir / f"bit_exact_step_{step}"
        model.save_pretrained(folder / "model")
        torch.save(
            {
                "sequences": [_tensors(sequence) for sequence in batch.sequences],
                "micro_batch_tokens": self._config.pass_tokens,
                "share_prefixes": self._config.share_prefixes,
                "logits_chunk_mb": self._config.logits_mb,
                "served": asdict(served),
                "device": model.device.type,
            },
            folder / "batch.pt",
        )
        return folder / "batch.pt"


def _refuse_truncation(batch: Batch, step: int) -> None:
    # vLLM's sampler on CUDA finds the tokens that they keep by one of two ways, by the size of its batch
    for sequence in batch.sequences:
        if sequence.top_p < 1 or sequence.top_k:
            raise NotExact(
                f"step {step}: --batch-invariant does not cover top-p and top-k on CUDA, and a sequence came with top_p"
                f" {sequence.top_p}, top_k {sequence.top_k}: let the environment sample without them, or drop the flag"
            )


def _tensors(sequence: Sequence) -> dict[str, object]:
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in asdict(sequence).items()
    }


def sequence_from(fields: Mapping[str, object]) -> Sequence:
    """The inverse of what `keep` stores of a sequence."""
    values: dict[str, Any] = {
        name: value.numpy() if isinstance(value, Tensor) else value for name, value in fields.items()
    }
    return Sequence(**values)
