"""The GRPO trainer process.

    python -u example_trainer/grpo.py --model-name MODEL --weight-bridge-mode shared_vllm --use-shared-memory
    --vllm-port 9001

    batching API ──batch──▶ tensors ─▶ log-probabilities ─▶ loss ─▶ step ─▶ bridge ──weights──▶ vLLM
         ▲                                                                    │
         └────────────── step done, policy version N now serves ◀─────────────┘

Step N trains on what earlier policies sampled and makes policy version N; a run starts by giving vLLM the weights it
starts from. A batch in which no group has a signal, or whose gradient is not finite, makes no optimizer update
(moments and schedule stay), but the version rises and is synced all the same: steps, policy versions and the
environments' evaluation schedule never drift apart. Groups that cannot be trained on are rejected to the API and
left out; a batch of nothing else is no step.
"""

import example_trainer.openmp  # noqa: F401  isort: skip  before torch

import contextlib
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from atroposlib.config import load_config
from atroposlib.logs import configure_logging, get_logger, print_error
from example_trainer.adapters import ADAPTER
from example_trainer.api_client import ApiClient
from example_trainer.bad_data import BadBatches, RejectionBudget
from example_trainer.batching import Batch, make_batch
from example_trainer.bridges import SyncReport, WeightBridge, make_bridge
from example_trainer.checkpoint import (
    WHOLE_MODEL,
    Checkpoints,
    Progress,
    find_checkpoint,
    remove_leftovers,
    restore,
    save_final_model,
)
from example_trainer.config import TrainerConfig
from example_trainer.errors import BadBatch, TrainerError
from example_trainer.exactness import Comparison, Exactness
from example_trainer.losses import LossSettings
from example_trainer.metrics import Row, open_metrics
from example_trainer.model import load_model, load_tokenizer
from example_trainer.optimizer import clip_gradients, make_optimizer, make_scheduler, update
from example_trainer.packing import micro_batches
from example_trainer.step import StepFigures, batch_gradients

log = get_logger(__name__)

# nats on a fixed prompt; rounding of the served precision stays well below, another model's weights are above
PARITY_LIMITS = {"float32": 0.05, "float16": 0.25, "bfloat16": 1.0}


def run(config: TrainerConfig, bridge: WeightBridge | None = None) -> None:
    """Train to `config.training_steps`. `bridge` replaces the configured one. Raises TrainerError, of which
    BridgeError is one.
    """
    device = prepare_torch(config)
    bridge = bridge or make_bridge(config)
    checkpoint = find_checkpoint(config.resume, config.save_path)
    remove_leftovers(config.save_path)
    source = str(checkpoint) if checkpoint else config.model_name
    settings = loss_settings(config)

    rejections = RejectionBudget(config.max_rejected_groups)
    bad_batches = BadBatches(config.on_bad_batch, config.max_bad_batches)

    with contextlib.ExitStack() as resources:
        api = resources.enter_context(contextlib.closing(connect_api(config, bridge, rejections)))
        api.wait_until_up()
        log.info("Loading %s in float32 on %s", source, device)
        resources.enter_context(contextlib.closing(bridge))
        model = bridge.connect(source, device)
        exactness = Exactness(config)
        exactness.prepare(model, bridge.served_dtype)
        tokenizer = load_tokenizer(source)
        reference = load_model(config.model_name, device).requires_grad_(False) if config.kl_coef > 0 else None
        optimizer = make_optimizer(model.parameters(), config)
        progress = restore(checkpoint, optimizer) if checkpoint else Progress()
        scheduler = make_scheduler(optimizer, config, progress.updates)
        if progress.step >= config.training_steps:
            raise TrainerError(
                f"{checkpoint} has done {progress.step} of {config.training_steps} steps: raise --training-steps to"
                " go on"
            )

        metrics = resources.enter_context(contextlib.closing(open_metrics(config, progress.step + 1)))
        form = ADAPTER if config.bridge.trains_adapter else WHOLE_MODEL
        checkpoints = Checkpoints(config.save_path, config.keep_checkpoints, form)
        bridge.sync(progress.policy_version, keep_weights)
        check_parity(bridge, config)
        vocab_size = model.config.get_text_config().vocab_size
        needs = dict(vocab_size=vocab_size, trainable_only=True)
        api.register(starting_step=progress.step, run=progress.run, trained_leases=progress.leases, **needs)
        api.report_step(progress.step, progress.policy_version)

        proven = False
        for step in range(progress.step + 1, config.training_steps + 1):
            start, rejected_before = time.monotonic(), rejections.total
            batch = trainable_batch(api, config, progress.policy_version, vocab_size, rejections)
            fetched = time.monotonic()
            if step == 1:
                log_starting_accuracy(api)

            comparison = Comparison()
            figures = gradients_of(batch, model, reference, settings, config, comparison)
            exactness_row: Row = {}
            optimizer_row: Row = {}
            try:
                exactness_row = exactness.judge(comparison, step, batch, model)
                if figures is not None:
                    grad_norm = clip_gradients(optimizer, config.max_grad_norm)
                    expect_finite(figures.loss)
                    optimizer_row = {"grad_norm": grad_norm, "lr": float(scheduler.get_last_lr()[0])}
                    bad_batches.note_update()
            except BadBatch as error:
                bad_batches.note(error, step)
                optimizer.zero_grad(set_to_none=True)
                figures = None
            differentiated = time.monotonic()

            updates = progress.updates + (figures is not None)
            version = progress.policy_version + 1
            progress = replace(
                progress, step=step, policy_version=version, updates=updates, leases=api.unacknowledged()
            )
            sync = bridge.sync(
                progress.policy_version, keep_weights if figures is None else partial(update, optimizer, scheduler)
            )
            serves_it = sync.policy_version == progress.policy_version
            if serves_it and not proven:
                check_parity(bridge, config)
                proven = True
            api.report_step(step, sync.policy_version)
            synced = time.monotonic()
            accuracy = api.evaluation(progress.policy_version, config.eval_deadline) if serves_it else None

            row = {
                "step": step,
                "policy_version": progress.policy_version,
                "accuracy": accuracy,
                **batch_row(batch),
                **({} if figures is None else asdict(figures)),
                **exactness_row,
                **optimizer_row,
                "updates": progress.updates,
                "rejected_groups": rejections.total - rejected_before,
                "bad_batches": bad_batches.total,
                **sync_row(sync),
                "generate_s": fetched - start,
                "train_s": differentiated - fetched + sync.update_s,
                "step_s": synced - start,
                "eval_wait_s": time.monotonic() - synced,
            }
            metrics.write(row)
            print(step_line(row, config.training_steps), flush=True)
            if config.checkpoint_interval and step % config.checkpoint_interval == 0:
                log.info("Writing checkpoint %s%d to %s", form.step_prefix, step, config.save_path)
                checkpoints.save(progress, model, tokenizer, optimizer)
                api.acknowledge()
            elif config.ack_after == "step" or not config.checkpoint_interval:
                api.acknowledge()
        exactness.expect_agreement()
        log.info("Writing the trained model to %s", config.save_path)
        print(f"Trained model: {save_final_model(config.save_path, model, tokenizer, form)}", flush=True)
        api.acknowledge()


def connect_api(config: TrainerConfig, bridge: WeightBridge, rejections: RejectionBudget) -> ApiClient:
    """A client of the batching API that stops waiting when vLLM is gone, or when too many groups are set aside."""
    token = None if config.atropos_token is None else config.atropos_token.get_secret_value()
    sleep = partial(sleep_beside, bridge)
    return ApiClient(
        config.atropos_url,
        registration(config),
        patience_s=config.api_timeout,
        token=token,
        sleep=sleep,
        on_rejected=rejections.note,
    )


def trainable_batch(
    api: ApiClient, config: TrainerConfig, policy_version: int, vocab_size: int, rejections: RejectionBudget
) -> Batch:
    """The next batch with a group that can be trained on; the others are rejected to the API.

    A batch without any is passed over, so that a run that resumes, which is given the others alone, makes the same
    steps.
    """
    while True:
        batch = make_batch(
            api.fetch_batch(config.fetch_timeout),
            seq_len=config.seq_len,
            divide_by_std=config.advantage_std,
            policy_version=policy_version,
            vocab_size=vocab_size,
        )
        rejections.note_trainable(batch.groups)
        if batch.rejected:
            rejections.note(api.reject(batch.rejected))
        if batch.groups:
            return batch
        log.warning("No group of this batch can be trained on: fetching another")


def expect_finite(loss: float) -> None:
    """Raise BadBatch unless it is."""
    if not math.isfinite(loss):
        raise BadBatch(
            f"the loss is {loss}; the weights were left as they are. "
            "Check the sampler's log-probabilities and the advantages of the environments"
        )


def keep_weights() -> None:
    """The update of a sync that only hands the weights over as they are."""


def sleep_beside(bridge: WeightBridge, seconds: float) -> None:
    """A pause of whoever waits for the API: without vLLM no batch will ever come, so the bridge's error comes first."""
    bridge.check()
    time.sleep(seconds)


def gradients_of(
    batch: Batch,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    settings: LossSettings,
    config: TrainerConfig,
    comparison: Comparison,
) -> StepFigures | None:
    """Put the batch's gradient into the parameters' `.grad`; None for a batch without a signal."""
    if batch.truncated_sequences:
        log.warning(
            "%d of %d sequences exceed --seq-len %d and lost their end",
            batch.truncated_sequences,
            batch.sequences,
            config.seq_len,
        )
    if not batch.rollouts:
        log.warning("All %d groups of this batch have equal scores: no update, the weights stay", batch.groups)
        return None
    return batch_gradients(
        model,
        micro_batches(batch.rollouts, config.micro_batch_tokens, model.device),
        settings,
        reference=reference,
        chunk_mb=config.logits_chunk_mb,
        loss_tokens=batch.completion_tokens,
        comparison=comparison,
    )


def prepare_torch(config: TrainerConfig) -> torch.device:
    """Seed, threads and device as configured. Raises TrainerError for a GPU that is not there."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise TrainerError(
            f"--device {config.device}: PyTorch sees no CUDA device; use --device cpu or auto, or install a CUDA build"
            " of PyTorch"
        )
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def loss_settings(config: TrainerConfig) -> LossSettings:
    """The loss as configured; the upper clip distance is the lower one unless given."""
    clip_high = config.clip_eps if config.clip_eps_high is None else config.clip_eps_high
    return LossSettings(
        clip_low=config.clip_eps, clip_high=clip_high, kl_coef=config.kl_coef, entropy_coef=config.entropy_coef
    )


def registration(config: TrainerConfig) -> dict[str, Any]:
    """The body of the API's /register, but for the step it starts from."""
    return {
        "wandb_group": config.wandb_group or config.save_path.name,
        "wandb_project": config.wandb_project,
        "batch_size": config.sequences_per_step,
        "max_token_len": config.seq_len,
        "checkpoint_dir": str(config.save_path),
        "save_checkpoint_interval": config.checkpoint_interval,
        "num_steps": config.training_steps,
    }


def check_parity(bridge: WeightBridge, config: TrainerConfig) -> None:
    """Raise TrainerError if vLLM and the trainer disagree about a fixed prompt: then vLLM does not serve these
    weights.
    """
    difference = bridge.parity_probe()
    limit = config.parity_tolerance or PARITY_LIMITS[bridge.served_dtype]
    if not difference <= limit:
        raise TrainerError(
            f"vLLM's log-probabilities differ from the trainer's by {difference:.3g} nats (root mean square) right"
            f" after a sync (--parity-tolerance {limit}): it serves another model, or in a precision for which the"
            " tolerance must be raised"
        )
    log.info(
        "Parity: vLLM's log-probabilities are the trainer's but for %.2g nats, root mean square (limit %g)",
        difference,
        limit,
    )


def log_starting_accuracy(api: ApiClient) -> None:
    """Show the accuracy of the untrained policy, if an environment evaluated it before it began to sample."""
    accuracy = api.evaluation(0, deadline_s=0)
    if accuracy is not None:
        print(f"Before training | accuracy {100 * accuracy:.1f} %", flush=True)


def batch_row(batch: Batch) -> Row:
    """The batch's part of a metrics row."""
    return {
        "reward_mean": batch.reward_mean,
        "reward_std": batch.reward_std,
        "completion_tokens": batch.completion_tokens,
        "trained_tokens": batch.trained_tokens,
        "sequences": batch.sequences,
        "truncated_sequences": batch.truncated_sequences,
        "groups": batch.groups,
        "zero_variance_groups": batch.zero_variance_groups,
        "staleness_mean": batch.staleness_mean,
    }


def sync_row(sync: SyncReport) -> Row:
    """The bridge's part of a metrics row."""
    return {
        "served_version": sync.policy_version,
        "sync_stall_s": sync.stall_s,
        "sync_transfer_s": sync.transfer_s,
        "sync_apply_s": sync.apply_s,
        "sync_bytes": sync.bytes_moved,
        "servers": sync.servers,
    }


def step_line(row: dict[str, Any], steps: int) -> str:
    """The console line of a step: `Step 1/100 | reward 0.11 | ...`; what was not measured is left out."""
    parts = [f"Step {row['step']}/{steps}", f"reward {row['reward_mean']:.3f}"]
    if row["accuracy"] is not None:
        parts.append(f"accuracy {100 * row['accuracy']:.1f} %")
    parts.append("no update" if row.get("loss") is None else f"loss {row['loss']:+.4f}")
    parts.append(f"{row['completion_tokens'] / row['step_s']:.0f} tokens/s")
    parts.append(f"stall {1000 * row['sync_stall_s']:.0f} ms")
    if row["staleness_mean"] is not None:
        parts.append(f"staleness {row['staleness_mean']:.1f}")
    parts.append(f"step {row['step_s']:.1f} s (sampling {row['generate_s']:.1f}, training {row['train_s']:.1f})")
    return " | ".join(parts)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 when trained, 1 with one line on stderr when not, 130 on Ctrl-C."""
    config = load_config(TrainerConfig, argv, prog="grpo")
    configure_logging("trainer")
    disable_progress_bar()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(config)
    except TrainerError as error:
        print_error("grpo", error)
        return 1
    except KeyboardInterrupt:
        print("grpo: interrupted", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
