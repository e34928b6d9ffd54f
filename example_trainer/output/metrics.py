"""Metrics of a run behind one small interface: metrics.jsonl always, TensorBoard and Weights & Biases on request.

metrics.jsonl has one JSON object per step, written whole and flushed at the end of the step. Every row has the keys
of ROW_KEYS, null where a value was not measured at that step, and may have more.
"""

import html
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from atroposlib.errors import loading, reading
from atroposlib.extras import install
from atroposlib.logs import get_logger
from atroposlib.row_files.kept_rows import parse_keep
from atroposlib.row_files.record_file import free_space
from example_trainer.bridges.base import SyncReport
from example_trainer.data.batching import Batch
from example_trainer.errors import TrainerError
from example_trainer.output.samples import Sample
from example_trainer.output.step_chain import BATCHES
from example_trainer.output.step_file import StepFile
from example_trainer.settings.config import TrainerConfig

log = get_logger(__name__)

ROW_KEYS = (  # the first columns, in their order; a new metric needs no place here
    "step",
    "policy_version",
    "reward_mean",
    "reward_std",
    "accuracy",
    "loss",
    "pg_loss",
    "kl",
    "entropy",
    "ratio_mean",
    "ratio_clipped_frac",
    "ratio_max",
    "ratio_capped_frac",
    "importance_masked_frac",
    "grad_norm",
    "lr",
    "completion_tokens",
    "staleness_mean",
    "step_s",
    "generate_s",
    "train_s",
    "sync_stall_s",
    "sync_transfer_s",
    "sync_apply_s",
    "logprob_diff_mean",
    "logprob_diff_max",
    "sampler_kl",
    "bit_exact/differing_tokens",
    "bit_exact/tokens",
    "bit_exact/max_abs_diff",
    "ratio_tokens_different",
)
Row = Mapping[str, float | int | None]
StepRow = Mapping[str, float | int | str | None]  # with digests, which metrics.jsonl alone keeps


def step_row(batch: Batch, measured: Row, sync: SyncReport, **run: float | int | str | None) -> StepRow:
    """One step's row of metrics.jsonl. `measured` holds the metrics of loss, optimizer and exactness check, as far as
    there are any, and `run` what the loop itself counts and times; times are in seconds.
    """
    return {
        "reward_mean": batch.reward_mean,
        "reward_std": batch.reward_std,
        "completion_tokens": batch.completion_tokens,
        "completion_tokens_per_rollout": batch.completion_tokens / batch.rollouts if batch.rollouts else None,
        "trained_tokens": batch.trained_tokens,
        "rollouts": batch.rollouts,
        "sequences": batch.sampled_sequences,
        "truncated_sequences": batch.truncated_sequences,
        "cut_answers": batch.cut_answers,
        "failed_rollouts": batch.failed_rollouts,
        "groups": batch.groups,
        "zero_variance_groups": batch.zero_variance_groups,
        "staleness_mean": batch.staleness_mean,
        "staleness_max": batch.staleness_max,
        **measured,
        **run,
        "served_version": sync.policy_version,
        "sync_stall_s": sync.stall_s,
        "sync_transfer_s": sync.transfer_s,
        "sync_apply_s": sync.apply_s,
        "sync_bytes": sync.bytes_moved,
        "sync_bytes_whole": sync.bytes_whole,
        "sync_words_changed": sync.words_changed,
        "servers": sync.servers,
    }


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """A row on the console: `Step 1/100 | reward 0.11 | ...`; what was not measured is left out."""
    accuracy, loss, staleness = row["accuracy"], row.get("loss"), row["staleness_mean"]
    to_teacher = row.get("teacher_kl")
    parts = [
        f"Step {row['step']}/{steps}",
        f"reward {row['reward_mean']:.3f}",
        None if accuracy is None else f"accuracy {100 * accuracy:.1f} %",
        "no update" if loss is None else f"loss {loss:+.4f}",
        None if to_teacher is None else f"teacher KL {to_teacher:.4f}",
        f"{row['completion_tokens'] / row['step_s']:.0f} tokens/s",
        f"stall {1000 * row['sync_stall_s']:.0f} ms",
        None if staleness is None else f"staleness {staleness:.1f}",
        f"step {row['step_s']:.1f} s (sampling {row['generate_s']:.1f}, training {row['train_s']:.1f})",
    ]
    return " | ".join(part for part in parts if part is not None)


class JsonlSink(StepFile):
    """metrics.jsonl. Each row has the `time` at which it was written."""

    def __init__(self, path: Path, first_step: int) -> None:
        super().__init__(path, first_step, "metrics", "--metrics-path")

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Left to the environments, whose samples.jsonl has them all."""

    def write(self, row: StepRow) -> None:
        """One line, whole or not at all; it waits in memory while the disk takes no more."""
        keys = (*ROW_KEYS, *(key for key in row if key not in ROW_KEYS))
        self.append(int(row["step"] or 0), {**{key: row.get(key) for key in keys}, "time": time.time()})


class Sink(Protocol):
    """Somewhere the metrics of a run go."""

    def write(self, row: StepRow) -> None:
        """Keep one step's row; it has a `step`."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show sampled answers of `step` as a table, where that can be."""


class TensorBoardSink:
    """Scalars `train/<key>`, and tables of samples in Markdown. On a disk without room it ends, for its writer does:
    metrics.jsonl has all rows.
    """

    def __init__(self, folder: Path, resources: ExitStack) -> None:
        with loading("--tensorboard", TrainerError, remedy=install("tensorboard")):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder))
        self._folder, self._has_ended = folder, False
        resources.callback(self._write, self._writer.close)

    def write(self, row: StepRow) -> None:
        self._write(partial(self._add, row))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [f"| {_cell(sample.prompt)} | {_cell(sample.answer)} | {sample.reward:g} |" for sample in samples]
        table = "\n".join(["| prompt | answer | reward |", "|---|---|---|", *rows])
        self._write(partial(self._writer.add_text, "train/samples", table, step))

    def _add(self, row: StepRow) -> None:
        for key, value in row.items():
            if value is not None and not isinstance(value, str):
                self._writer.add_scalar(f"train/{key}", value, row["step"])
        self._writer.flush()

    def _write(self, act: Callable[[], None]) -> None:
        if self._has_ended:
            return
        try:
            act()
        except OSError as error:
            self._has_ended = True
            log.error(
                "%s cannot be written: %s (%s). TensorBoard gets no more of this run until it is resumed; metrics.jsonl"
                " has all of it",
                self._folder,
                error.strerror or error,
                free_space(self._folder),
            )


def _cell(text: str) -> str:
    """Model output in a Markdown table: on one line, as text and not as markup."""
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


class WandbSink:
    """Weights & Biases, under the project and group that the environments are told too: one log entry per step,
    `train/<key>`, and tables of samples.
    """

    def __init__(self, config: TrainerConfig, resources: ExitStack, kernels: str) -> None:
        with loading("--use-wandb", TrainerError, remedy=install("wandb")):
            import wandb
        self._table = wandb.Table
        self._run = wandb.init(
            project=config.wandb_project,
            group=config.wandb_group,
            name="trainer",
            dir=str(config.log_dir),
            config=config.model_dump(mode="json") | {"kernels": kernels},
        )
        resources.callback(self._run.finish)

    def write(self, row: StepRow) -> None:
        metrics = {f"train/{key}": value for key, value in row.items() if isinstance(value, (int, float))}
        self._run.log(metrics, step=int(row["step"] or 0))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [[step, sample.prompt, sample.answer, sample.reward] for sample in samples]
        table = self._table(columns=["step", "prompt", "answer", "reward"], data=rows)
        self._run.log({"train/samples": table}, step=step)


def open_metrics(config: TrainerConfig, first_step: int, resources: ExitStack, kernels: str) -> list[Sink]:
    """The sinks that the configuration asks for, of a run that computes with `kernels`; `resources` closes them. Raises
    TrainerError for a package that is not installed, or a directory not to be written.
    """
    with reading(f"cannot keep metrics in {config.metrics_file}", TrainerError, remedy="set --log-dir, or free space"):
        config.log_dir.mkdir(parents=True, exist_ok=True)
        jsonl = JsonlSink(config.metrics_file, first_step)
    resources.callback(jsonl.close)
    sinks: list[Sink] = [jsonl]
    if config.metrics_port:
        from example_trainer.output.prometheus import PrometheusSink  # loads an HTTP server

        sinks.append(PrometheusSink(config.metrics_port, resources))
    if config.tensorboard:
        sinks.append(TensorBoardSink(config.log_dir / "tensorboard", resources))
    if config.use_wandb:
        sinks.append(WandbSink(config, resources, kernels))
    return sinks


def open_batches(config: TrainerConfig, first_step: int, resources: ExitStack) -> StepFile | None:
    """batches.jsonl, beside metrics.jsonl, of a run that can be repeated. Raises TrainerError as `open_trained`."""
    if not config.deterministic:
        return None
    path = config.metrics_file.with_name(BATCHES)
    with reading(f"cannot write {path}", TrainerError, remedy="set --metrics-path, or free space"):
        found = StepFile(path, first_step, "batches", "--metrics-path")
    resources.callback(found.close)
    return found


def open_trained(config: TrainerConfig, first_step: int, resources: ExitStack) -> StepFile | None:
    """trained.jsonl, unless the configuration has it off. Raises TrainerError for a directory not to be written."""
    if not config.save_trained:
        return None
    path = config.trained_file
    with reading(f"cannot write {path}", TrainerError, remedy="set --trained-path, or free space"):
        rows = StepFile(path, first_step, "trained groups", "--trained-path", parse_keep(config.keep_samples))
    resources.callback(rows.close)
    return rows
