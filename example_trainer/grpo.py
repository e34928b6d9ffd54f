"""The GRPO trainer process.

    python -u example_trainer/grpo.py --model-name MODEL --weight-bridge-mode shared_vllm --use-shared-memory
    --vllm-port 9001

    batching API ──batch──▶ tensors ─▶ log-probabilities ─▶ loss ─▶ step ─▶ bridge ──weights──▶ vLLM
         ▲                                                                    │
         └────────────── step done, policy version N now serves ◀─────────────┘

Step N trains on what earlier policies sampled and produces policy version N. A run begins by sending vLLM its start
weights. A step makes one optimizer update, or several with --updates-per-batch and --epochs (updates.py). A batch makes
none if its gradient is not finite, or if there is no gradient because no group has a signal and the loss has no KL or
entropy term. The moments do not change then, but the version still rises and is synced, so steps, policy versions and
the environments' evaluation schedule never drift apart. Groups that cannot be trained on are rejected to the API and
skipped; a batch of nothing else is not a step.
"""

if __name__ == "__main__":  # flags before torch, as atropos-grpo does
    from example_trainer.before_torch import check_before_torch

    check_before_torch()

import example_trainer.openmp  # noqa: F401  isort: skip  before torch

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from msgspec.structs import asdict
from transformers.utils.logging import disable_progress_bar

from atroposlib.config import load_config
from atroposlib.errors import AtroposError, one_line_errors
from atroposlib.logs import configure_logging, get_logger, say
from atroposlib.processes.utf8 import restart_in_utf8
from atroposlib.wire.batching import GroupRequirements, Registration
from example_trainer.bridges import Prepare, SyncReport, WeightBridge, make_bridge
from example_trainer.bridges.returning import ReturningBridge
from example_trainer.bridges.vllm_client import vllm_clients
from example_trainer.data.batching import Batch, GroupRecord, Item, make_batch
from example_trainer.data.routing_replay import shape_of
from example_trainer.errors import TrainerError
from example_trainer.exact.check import Exactness
from example_trainer.loop.api_client import ApiClient
from example_trainer.loop.bad_data import BadBatches, RejectionBudget
from example_trainer.loop.learner import Learner
from example_trainer.loop.overlap import EarlyGradients
from example_trainer.loop.saves import Saves
from example_trainer.loop.timeline import Timeline
from example_trainer.loop.updates import Plan, Updates
from example_trainer.loss.base import load_objective
from example_trainer.memory.plan import computes_in
from example_trainer.model.memory_check import one_line_when_out_of_memory
from example_trainer.model.rotary import expect_length, length_limit
from example_trainer.optim.optimizer import learning_rate
from example_trainer.output.metrics import open_metrics, open_trained, step_line, step_row
from example_trainer.output.model_card import write_model_card
from example_trainer.output.samples import samples_of
from example_trainer.output.trained_rows import trained_rows
from example_trainer.ranks.place import LOST, Place, ignore_signals, own_environment, too_few_gpus
from example_trainer.ranks.ranks import (
    ALONE,
    Ranks,
    RanksLost,
    ToldElsewhere,
    expect_the_same,
    join,
    told_once_a_machine,
)
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.by_rank import SharedRanks
from example_trainer.weights.checkpoint import expect_same_model, find_checkpoint
from example_trainer.weights.written import remove_leftovers

log = get_logger(__name__)

Watched = WeightBridge | Ranks | Saves

# nats on a fixed prompt; rounding of the served precision stays well below, another model's weights are above
PARITY_LIMITS = {"float32": 0.05, "float16": 0.25, "bfloat16": 1.0}


def run(config: TrainerConfig, prepare: Prepare | None = None) -> None:
    """Train to `config.training_steps`. `prepare` replaces the configured bridge. Raises TrainerError, of which
    BridgeError is one.
    """
    with one_line_when_out_of_memory(config), contextlib.ExitStack() as resources:
        with told_once_a_machine():
            device = prepare_torch(config)
            load_objective(config.objective)
            ranks = join(config, device)
        resources.callback(ranks.leave)
        expect_the_same(ranks, config)
        if not ranks.leads:
            learner = Learner(config, device, ranks)
            resources.callback(learner.close)
            ranks.follow(learner)
            return
        run = Run(config, device, ranks, prepare or make_bridge(config), resources)
        run.start()
        for step in range(run.progress.step + 1, config.training_steps + 1):
            run.step(step)
        run.finish()


class Run:
    """One training run: what it holds, and its steps. Everything that must be closed is in `resources`."""

    def __init__(
        self,
        config: TrainerConfig,
        device: torch.device,
        ranks: Ranks,
        prepare: Prepare,
        resources: contextlib.ExitStack,
    ) -> None:
        remove_leftovers(config.save_path)
        checkpoint = find_checkpoint(config.resume, config.save_path)
        if checkpoint:
            expect_same_model(checkpoint, config)
        config = Learner(config, device, ranks).settled()
        self.config = config
        self.rejections = RejectionBudget(config.max_rejected_groups)
        self.bad_batches = BadBatches(config.on_bad_batch, config.max_bad_batches)
        watched: list[Watched] = [ranks]
        self.api = ApiClient(
            config.atropos_url,
            registration(config),
            patience_s=config.api_timeout,
            token=config.atropos_token.get_secret_value() if config.atropos_token else None,
            sleep=partial(sleep_beside, watched),
            on_rejected=self.rejections.note,
        )
        resources.callback(self.api.close)
        self.api.wait_until_up()
        source = str(checkpoint) if checkpoint else config.model_name
        log.info("Loading %s on %s", source, device)
        self.learner, self.bridge = resources.enter_context(connected(config, prepare, source, device, ranks))
        watched.append(self.bridge)
        self.trained = self.learner.trained
        self.learner.begin(str(checkpoint or ""), self.bridge.served_dtype)
        self.progress = self.learner.progress
        choices = {"kernels": self.progress.kernels, "share_prefixes": self.progress.share_prefixes}
        self.config = config = config.model_copy(update=choices)
        self.exactness = Exactness(config, self.trained.model, self.bridge.served_dtype)
        if self.progress.step >= config.training_steps:
            raise TrainerError(
                f"{checkpoint} has done {self.progress.step} of {config.training_steps} steps: raise "
                "--training-steps to continue"
            )
        self.metrics = open_metrics(config, self.progress.step + 1, resources)
        self.trained_file = open_trained(config, self.progress.step + 1, resources)
        self.early: EarlyGradients | None = None  # of the batch that is fetched
        if config.overlap and not config.overlaps:
            log.info("Not computing before a batch is whole: it makes several updates, or recomputes log-probabilities")
        self._passed_over: list[GroupRecord] = []  # of batches without a group that can be trained on
        self.saves = Saves(config, self.learner, partial(sleep_beside, tuple(watched)))
        resources.push(self.saves.leave)
        watched.append(self.saves)
        self.needs = GroupRequirements(
            vocab_size=self.trained.model.config.get_text_config().vocab_size,
            trainable_only=True,
            logprobs_optional=not config.needs_sampler_logprobs,
            routing=shape_of(self.trained.model),
            routing_required=config.routing_replay == "required",
        )
        self.timeline = Timeline(vllm_clients(config))
        self.proven = False  # vLLM's weights by the probes, after an update

    def start(self) -> None:
        """Have vLLM serve the start weights, and register with the API."""
        progress = self.progress
        self.bridge.sync(progress.policy_version, keep_weights)
        expect_served_lengths(self.config, self.trained.model.config)
        check_served(self.bridge, progress.policy_version, self.config)
        self.api.register(
            starting_step=progress.step,
            run=progress.run,
            trained_leases=progress.leases,
            **asdict(self.needs),
        )
        self.api.report_step(progress.step, progress.policy_version)
        self.timeline.begin()

    def step(self, step: int) -> None:
        """Train on one batch, have vLLM serve the result, report."""
        start, rejected_before = time.monotonic(), self.rejections.total
        batch = self.trainable_batch()
        fetched = time.monotonic()
        early_s = self.early.seconds if self.early else 0.0
        # of the untrained policy, if an environment evaluated it before it began to sample
        if step == 1 and (accuracy := self.api.evaluation(0, deadline_s=0)) is not None:
            say(f"Before training | accuracy {100 * accuracy:.1f} %")
        updates = self.learn(batch, step)
        differentiated = time.monotonic()
        sync = self.hand_over(step, updates)
        self.api.report_step(step, sync.policy_version)
        self.keep_trained(step, batch, updates, updates.left_out)  # while the environments sample again
        synced = time.monotonic()
        version = self.progress.policy_version
        train_s = early_s + differentiated - fetched + sync.update_s
        row = step_row(
            batch,
            updates.row(),
            sync,
            step=step,
            policy_version=version,
            accuracy=(
                self.api.evaluation(version, self.config.eval_deadline) if sync.policy_version == version else None
            ),
            updates=self.progress.updates,
            rejected_groups=self.rejections.total - rejected_before,
            bad_batches=self.bad_batches.total,
            generate_s=fetched - start - early_s,
            early_s=early_s,
            train_s=train_s,
            step_s=synced - start,
            eval_wait_s=time.monotonic() - synced,
            **self.timeline.row(train_s),
        )
        for sink in self.metrics:
            sink.write(row)
        self.show_samples(step, batch)
        say(step_line(row, self.config.training_steps))
        self.save_if_due(step)

    def keep_trained(self, step: int, batch: Batch, updates: Updates, left_out: str | None) -> None:
        """Write the step's rows of trained.jsonl, if they are asked for."""
        records, self._passed_over = [*self._passed_over, *batch.records], []
        if self.trained_file is not None:
            rows = trained_rows(records, updates.logprobs, step=step, policy_version=step, left_out=left_out)
            self.trained_file.append(step, *rows)

    def show_samples(self, step: int, batch: Batch) -> None:
        """Give a group's answers to the sinks that people look at, at the first step and every --samples-interval."""
        interval, tokenizer = self.config.samples_interval, self.trained.tokenizer
        if interval and batch.shown and tokenizer and (step == 1 or step % interval == 0):
            for sink in self.metrics:
                sink.write_samples(step, samples_of(batch.shown, tokenizer))

    def finish(self) -> None:
        """Write the trained model, with its card."""
        self.exactness.expect_agreement()
        self.saves.complete()
        log.info("Writing the trained model to %s", self.config.save_path)
        final = self.config.save_path / self.trained.form.final
        self.trained.write(final, also=partial(write_model_card, config=self.config))
        say(f"Trained model: {final}")
        self.api.acknowledge()

    def trainable_batch(self) -> Batch:
        """The next batch with a group that can be trained on; the others are rejected to the API.

        A batch without any is passed over, so that a run that resumes, which is given the others alone, makes the same
        steps.
        """
        while True:
            self.early = self._early()
            batch = self.converted(
                self.api.fetch_batch(self.config.fetch_timeout, self.compute_early if self.early else None)
            )
            self.rejections.note(self.api.reject(batch.rejected), trainable=batch.groups)
            if self.early is not None:
                batch = self.early.of(batch, self.api.ids)
            if batch.groups:
                return batch
            self._passed_over += batch.records
            log.warning("No group of this batch can be trained on: fetching another")

    def converted(self, items: Iterable[Item]) -> Batch:
        """A batch as the API gave it, or a part of one."""
        return make_batch(
            items,
            seq_len=self.config.seq_len,
            loss=self.config,
            policy_version=self.progress.policy_version,
            needs=self.needs,
        )

    def compute_early(self, groups: Mapping[int, Item]) -> None:
        """Compute on groups of the next batch; those that cannot be trained on are left for it."""
        assert self.early is not None
        self.early.add({identity: self.converted([item]).sequences for identity, item in groups.items()})

    def _early(self) -> EarlyGradients | None:
        """For the next batch, with --overlap."""
        if not self.config.overlaps:
            return None
        ranks, rollouts = self.learner.ranks.shares, self.config.batch_size * self.config.gradient_accumulation_steps
        return EarlyGradients(self.learner, self.config.pass_tokens * ranks, max(ranks, rollouts // 4))

    def learn(self, batch: Batch, step: int) -> Updates:
        """The step's updates, begun: the first gradient is in the parameters' `.grad`, if the batch has any. Raises
        BadBatch or NotExact where the configuration says to stop.
        """
        config = self.config
        if batch.truncated_sequences:
            log.warning(
                "%d of %d sequences exceed --seq-len %d and were cut",
                batch.truncated_sequences,
                batch.sampled_sequences,
                config.seq_len,
            )
        if config.mask_truncated and batch.cut_answers is None:
            log.warning("--mask-truncated masks nothing: no group of this batch reports why its answers ended")
        if config.kl_coef and any(each.top_p < 1 or each.top_k for each in batch.sequences):
            log.warning(
                "--kl-coef compares two distributions that top-p and top-k truncated differently, the policy's and the"
                " start model's: sample with top_p 1 and without top_k"
            )
        if not batch.sequences:
            reason = (
                "equal scores" if batch.zero_variance_groups == batch.groups else "equal scores or cut answers alone"
            )
            log.warning(
                "All %d groups of this batch have %s: no update, the weights do not change", batch.groups, reason
            )
        updates = Updates(
            self.learner,
            self.bad_batches,
            Plan(
                config.updates_per_batch,
                config.epochs,
                recomputed=config.old_logprobs == "recomputed",
                loss_mean=config.loss_mean,
                seed=config.seed,
                step=step,
                rate=learning_rate(config, step, self.progress.updates),
            ),
        )
        try:
            judge = partial(self.exactness.judge, step=step, batch=batch, model=self.trained.model)
            updates.begin(batch, judge, self.early)
        except TrainerError as error:  # the batch that ends a run is the one to look at
            with contextlib.suppress(TrainerError):  # the first error is the one to report
                self.keep_trained(step, batch, updates, str(error))
            raise
        return updates

    def hand_over(self, step: int, updates: Updates) -> SyncReport:
        """Make the optimizer updates, if there are any, and have vLLM serve the result as the next policy version."""
        self.progress = replace(
            self.progress,
            step=step,
            policy_version=self.progress.policy_version + 1,
            leases=list(self.api.holding),
        )
        if self.config.bridge.owns_vllm:
            self.timeline.look()
        sync = self.bridge.sync(self.progress.policy_version, updates.make)
        self.progress = replace(self.progress, updates=self.progress.updates + updates.made)
        if sync.policy_version == self.progress.policy_version and not self.proven:
            check_served(self.bridge, self.progress.policy_version, self.config)
            self.proven = True
        return sync

    def is_due(self, step: int) -> bool:
        """Return whether a step ends with a checkpoint."""
        interval = self.config.checkpoint_interval
        return interval > 0 and step % interval == 0

    def save_if_due(self, step: int) -> None:
        """Begin the checkpoint that is due, and acknowledge what the run need not be given again."""
        config = self.config
        if self.is_due(step):
            self.saves.save(self.progress)
        self.saves.advance()
        if config.ack_after == "step" or not config.checkpoint_interval:
            self.api.acknowledge()
        else:
            self.api.acknowledge(self.saves.saved_leases)


@contextlib.contextmanager
def connected(
    config: TrainerConfig, prepare: Prepare, source: str, device: torch.device, ranks: Ranks = ALONE
) -> Iterator[tuple[Learner, WeightBridge]]:
    """The learner, with the weights of `source` (hub id or directory), and the bridge that hands them over.

    With single copy the weights become those of `source` at the first sync.
    """
    prepared = prepare(source, device)
    with contextlib.ExitStack() as resources:
        resources.callback(prepared.close)
        learner = Learner(config, device, ranks, prepared.storage)
        if isinstance(prepared.storage, SharedRanks):
            learner.load_over(source, prepared.storage.workers)
        else:
            learner.load(source)
        bridge = prepared.connect(learner.trained)
        if config.vllm_return_s and config.bridge.survives_vllm:
            servers, alone = vllm_clients(config), ranks.size == 1
            bridge = ReturningBridge(bridge, servers, config.vllm_return_s, sync_in_check=alone)
        yield learner, resources.enter_context(contextlib.closing(bridge))


def keep_weights() -> None:
    """The update of a sync that only hands the weights over as they are."""


def sleep_beside(watched: Sequence[Watched], seconds: float) -> None:
    """Pause a wait for the API. Without vLLM no batch will ever come, and without the other ranks none can be trained
    on, so their errors are raised first. A checkpoint that is written meanwhile gets its name.
    """
    for each in watched:
        each.check()
    time.sleep(seconds)


def prepare_torch(config: TrainerConfig) -> torch.device:
    """Seed, threads and device as configured. Raises TrainerError for a GPU that is not there."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise TrainerError(
            f"--device {config.device}: PyTorch finds no CUDA device; use --device cpu or auto, or install a CUDA build"
            " of PyTorch"
        )
    place = Place.of_this_process()
    if config.threads or config.cores or place.local_size > 1:
        sharing = 1 if config.cores else place.local_size  # by --cores, each rank has its own already
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // sharing))
    torch.manual_seed(config.seed)
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if place.local_size == 1:
        index = torch.device("cuda" if config.device == "auto" else config.device).index or 0
    elif place.local_rank >= torch.cuda.device_count():
        raise too_few_gpus(place.local_size, torch.cuda.device_count())
    else:
        index = place.local_rank
    torch.cuda.set_device(index)
    if computes_in(config, on_gpu=True) == "bfloat16":
        # of float32 products there is then the head's alone, whose hidden states are bfloat16's: TensorFloat-32 rounds
        # its weights less than vLLM does, which computes logits in bfloat16
        torch.set_float32_matmul_precision("high")
    return torch.device("cuda", index)  # NCCL's groups ask for an index


def registration(config: TrainerConfig) -> Registration:
    """Build what the API is told about this run; the step it starts from is known later."""
    return Registration(
        wandb_group=config.wandb_group or config.save_path.name,
        wandb_project=config.wandb_project,
        batch_size=config.batch_size * config.gradient_accumulation_steps,  # rollouts
        max_token_len=config.seq_len,
        checkpoint_dir=str(config.save_path),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=0,
        num_steps=config.training_steps,
    )


def expect_served_lengths(config: TrainerConfig, model: Any) -> None:
    """Raise ModelError if a vLLM server computes every token with another rotary table than the trainer, because it
    serves longer sequences than the model was made for.
    """
    if config.bridge.external or length_limit(model) is None:
        return
    for client in vllm_clients(config):
        if (served := client.status().max_model_len) is not None:
            expect_length(model, served, f"--max-model-len of the vLLM server at {client.url}")


def check_served(bridge: WeightBridge, policy_version: int, config: TrainerConfig) -> None:
    """Raise TrainerError if vLLM computes with other weights than the trainer's, by their words, or by the
    log-probabilities of a fixed prompt.
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
    difference = bridge.parity_probe()
    coarser = "bfloat16" if "bfloat16" in (config.kernels, config.compute_dtype) else bridge.served_dtype
    limit = config.parity_tolerance or max(PARITY_LIMITS[coarser], PARITY_LIMITS[bridge.served_dtype])
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


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 when trained; exits with 1 and one line on stderr when not, with 130 on Ctrl-C."""
    if argv is None:
        restart_in_utf8()
    place = Place.of_this_process()
    config = load_config(TrainerConfig, argv, prog="grpo", env=own_environment(os.environ))
    if place.rank == 0:
        configure_logging("trainer")
    else:  # which does as rank 0 does, and reports it
        configure_logging(f"trainer rank {place.rank}", level=logging.WARNING)
    disable_progress_bar()
    if place.size == 1:  # before_torch.py has told several ranks what to do on a signal
        signal.signal(signal.SIGTERM, _terminate)
    with one_line_errors("grpo"):
        try:
            run(config)
        except ToldElsewhere as error:
            return error.exit_status if place.parent is not None else LOST  # to an agent that tells causes apart
        except RanksLost as error:
            if place.rank == 0 and place.parent is None:
                raise
            # rank 0 and the parent know which rank and why
            log.log(logging.WARNING if place.rank == 0 or place.parent is None else logging.INFO, "%s", error)
            return error.exit_status
        except AtroposError as error:
            if place.rank == 0:
                raise
            raise TrainerError(f"trainer rank {place.rank} of {place.size}: {error}") from error
        finally:
            if place.size > 1:
                ignore_signals()  # everything is closed, and what is said now is the run's last word
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
