"""The loop of a run: its steps, by phases that the timeline counts and names.

    sampling ──batch──▶ forward and backward ──gradient──▶ sync ──▶ report ──▶ evaluation ──▶ save
                                                            └─ optimizer, where the weights may change

Step N trains on what earlier policies sampled and produces policy version N. A run begins by sending vLLM its start
weights. A step makes one optimizer update, or several with --updates-per-batch and --epochs (updates.py). A batch makes
none if its gradient is not finite, or if there is no gradient because no group has a signal and the loss has no KL or
entropy term. The moments do not change then, but the version still rises and is synced, so steps, policy versions and
the environments' evaluation schedule never drift apart. Groups that cannot be trained on are rejected to the API and
skipped; a batch of nothing else is not a step.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec.structs import asdict
from msgspec.structs import replace as replace_struct

from atroposlib.logs import get_logger, say
from atroposlib.wire.batching import GroupRequirements, TrainerStep
from atroposlib.wire.held_out import HeldOut
from example_trainer.bridges import BridgeError, SyncReport, WeightBridge
from example_trainer.data.batching import Batch, GroupRecord, Item, make_batch
from example_trainer.data.offline import Sides
from example_trainer.data.order import in_order
from example_trainer.errors import TrainerError
from example_trainer.exact.check import Exactness
from example_trainer.loop.api_client import ApiClient, ApiError
from example_trainer.loop.bad_data import BadBatches, RejectionBudget
from example_trainer.loop.best import BestPolicies
from example_trainer.loop.decoded import DecodeProof
from example_trainer.loop.learner import Learner
from example_trainer.loop.membership import Membership
from example_trainer.loop.offline import OfflineData
from example_trainer.loop.overlap import EarlyGradients
from example_trainer.loop.saves import Saves
from example_trainer.loop.served import check_served, compared_dtypes, expect_served_lengths
from example_trainer.loop.timeline import Timeline
from example_trainer.loop.updates import Updates, plan_of_step
from example_trainer.output.metrics import Sink, step_line, step_row
from example_trainer.output.receipt import write_receipt
from example_trainer.output.samples import samples_of
from example_trainer.output.step_chain import StepDigests, batch_digest, batch_rows
from example_trainer.output.step_file import StepFile
from example_trainer.output.trained_rows import trained_rows
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import Progress, note_end
from example_trainer.weights.written import CheckpointError, TrainedModel

log = get_logger(__name__)


@dataclass
class Run:
    """One training run. `opening.py` opens and closes what it holds; `config` is final."""

    config: TrainerConfig
    api: ApiClient
    learner: Learner
    bridge: WeightBridge
    exactness: Exactness
    saves: Saves
    rejections: RejectionBudget
    metrics: list[Sink]
    trained_file: StepFile | None
    needs: GroupRequirements
    timeline: Timeline
    trained: TrainedModel = field(init=False)
    progress: Progress = field(init=False)
    bad_batches: BadBatches = field(init=False)
    best: BestPolicies = field(init=False)
    proof: DecodeProof = field(init=False)
    membership: Membership = field(init=False)
    reported: TrainerStep = field(init=False)
    offline_examples: list[Sides] = field(default_factory=list)  # of --offline-data
    offline: OfflineData | None = None  # once there are weights to start from
    early: EarlyGradients | None = None  # of the batch that is fetched
    proven: bool = False  # vLLM's weights by the probes, after an update
    batches_file: StepFile | None = None  # of a run that can be repeated
    _weights: str = ""  # the digest of the weights as they are, in such a run
    _items: list[Item] = field(default_factory=list)  # of the step's batch
    _passed_over: list[GroupRecord] = field(default_factory=list)  # of batches without a group that can be trained on
    _failure: TrainerError | None = None  # of this step, by a peer
    _misses_evaluation: bool = False  # of the policy that the run was resumed with

    def __post_init__(self) -> None:
        self.trained, self.progress = self.learner.trained, self.learner.progress
        done = self.progress
        self._misses_evaluation = done.step > 0 and done.evaluated not in (None, done.policy_version)
        self.bad_batches = BadBatches(self.config.on_bad_batch, self.config.max_bad_batches)
        self.best = BestPolicies(self.config, self.trained, self.progress)
        self.membership = Membership(self.api, self.bridge, self.timeline)
        dtypes = compared_dtypes(self.bridge, self.config, self.progress.kernels)
        exact = self.exactness.served is not None
        self.proof = DecodeProof(self.learner, dtypes, self.config.parity_tolerance, exact=exact)

    def start(self) -> None:
        """Have vLLM serve the start weights, and register with the API."""
        progress = self.progress
        self.bridge.sync(progress.policy_version, keep_weights)
        if self.batches_file is not None:
            self._weights = self.trained.digest()
            self.keep_receipt()
        if self.offline_examples:
            self.offline = OfflineData(self.learner, self.offline_examples)
        expect_served_lengths(self.config, self.trained.model.config)
        self.check_served()
        self.proof.expect()
        self.api.register(
            starting_step=progress.step,
            says_done=True,
            run=progress.run,
            trained_leases=progress.leases,
            **asdict(self.needs),
        )
        self.report(TrainerStep(progress.step, progress.policy_version, num_steps=progress.ends_early_after))
        self.timeline.begin()

    def step(self, step: int) -> None:
        """Train on one batch, have vLLM serve the result, report."""
        phase, rejected_before = self.timeline.phase, self.rejections.total
        with phase("sampling"):
            batch = self.trainable_batch()
            # of the untrained policy, if an environment evaluated it before it began to sample
            if step == 1 and (held_out := self.api.evaluation(0, deadline_s=0)) is not None:
                say(f"Before training | accuracy {100 * held_out.accuracy:.1f} %")
        with phase("forward and backward"):
            self.proof.expect()
            updates = self.learn(batch, step)
        self.take_missed_evaluation()
        with phase("sync"):
            sync = self.hand_over(step, updates)
        held_out = None
        with phase("report"):
            with self.failing_once_saved():
                self.report(TrainerStep(step, sync.policy_version, num_steps=self.progress.ends_early_after))
            self.keep_trained(step, batch, updates, updates.left_out)  # while the environments sample again
            digests = self.chained(step)
        with phase("evaluation"), self.failing_once_saved():
            held_out = None if self._failure else self.evaluation(sync)
        row = step_row(
            batch,
            updates.row(),
            sync,
            step=step,
            policy_version=self.progress.policy_version,
            accuracy=held_out.accuracy if held_out else None,
            accuracy_stderr=held_out.stderr if held_out else None,
            updates=self.progress.updates,
            rejected_groups=self.rejections.total - rejected_before,
            bad_batches=self.bad_batches.total,
            **self.timeline.row(),
            **digests,
        )
        for sink in self.metrics:
            sink.write(row)
        self.show_samples(step, batch)
        say(step_line(row, self.config.training_steps))
        with phase("save"):
            if held_out is not None:
                self.note(held_out)
            self.save_if_due(step)

    def finish(self) -> None:
        """Write the trained model, then say how the last policy and the best one did. Raises TrainerError; for a check
        that fails, once the model is on the disk.
        """
        final = self.saves.write_final()
        if self.batches_file is not None:
            self.keep_receipt(finished=True)
        self.proof.expect()
        self.exactness.expect_agreement()
        try:
            self.take_missed_evaluation()
            self.serve_best_again()
        except TrainerError as error:  # what was trained is on the disk
            log.warning("The best policy is not asked further questions: %s", error)
        try:
            self.best.remove_outdone(self.progress.step)
            self.best.settle(final)
        except CheckpointError as error:
            log.warning("The last policy is not kept as the best one: %s", error)
        self.report(replace_struct(self.reported, done=True))
        for line in self.best.lines():
            say(line)
        self.api.acknowledge()
        note_end(self.config.save_path, self.progress)

    def trainable_batch(self) -> Batch:
        """The next batch with a group that can be trained on; the others are rejected to the API.

        A batch without any is passed over, so that a run that resumes, which is given the others alone, makes the same
        steps.
        """
        while True:
            self.early = self._early()
            items = self.api.fetch_batch(self.config.fetch_timeout, self.compute_early if self.early else None)
            if self.config.deterministic:
                items = self.api.reordered(items, in_order(items, self.progress.step))
            self._items, batch = items, self.converted(items)
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
        sequences = {identity: self.converted([item]).sequences for identity, item in groups.items()}
        with self.timeline.phase("overlap"):
            self.early.add(sequences)

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
        if not batch.sequences and self.offline is None:
            reason = (
                "equal scores" if batch.zero_variance_groups == batch.groups else "equal scores or cut answers alone"
            )
            log.warning(
                "All %d groups of this batch have %s: no update, the weights do not change", batch.groups, reason
            )
        updates = Updates(
            self.learner,
            self.bad_batches,
            plan_of_step(config, step, self.progress.updates, batch),
            self.offline,
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
            mismatch=self.exactness.mismatch,
        )
        if self.config.bridge.owns_vllm:
            self.timeline.look()
        # where the bridge lets the weights change
        make = self.timeline.phase("optimizer")(partial(self.change_weights, updates))
        self.membership.follow()
        self.bridge.last_version = self.last_step
        sync = self.bridge.sync(self.progress.policy_version, make)
        self.membership.report()
        self.progress = replace(self.progress, updates=self.progress.updates + updates.made)
        if sync.policy_version == self.progress.policy_version:
            if not self.proven:
                self.check_served()
                self.proven = True
            elif self.config.probe_every and step % self.config.probe_every == 0:
                self.proof.begin(self.bridge.decoders(), self.progress.policy_version)
        return sync

    def change_weights(self, updates: Updates) -> None:
        """Make the updates of a step; after those of the last step the weights become their average, if one is kept."""
        updates.make()
        if self.config.ema_decay and self.progress.step == self.last_step:
            log.info("The weights become their average over the updates (--ema-decay %g)", self.config.ema_decay)
            self.learner.take_average()

    def check_served(self) -> None:
        """Raise TrainerError if vLLM has other weights than this run's, and begin to see what it decodes."""
        check_served(self.bridge, self.progress.policy_version, self.config, self.progress.kernels)
        self.proof.begin(self.bridge.decoders(), self.progress.policy_version)

    def evaluation(self, sync: SyncReport) -> HeldOut | None:
        """Wait for the evaluation of the new policy; None without one, and where vLLM does not serve that policy."""
        version = self.progress.policy_version
        return self.api.evaluation(version, self.config.eval_deadline) if sync.policy_version == version else None

    def take_missed_evaluation(self) -> None:
        """Before the weights change, wait for the evaluation of the policy that the run was resumed with, if an earlier
        process wrote its checkpoint and did not live to learn how it does.
        """
        progress, misses = self.progress, self._misses_evaluation
        self._misses_evaluation = False
        if not misses:
            return
        with self.timeline.phase("evaluation"):
            held_out = self.api.evaluation(progress.policy_version, self.config.eval_deadline)
        if held_out is not None:
            say(f"Step {progress.step}, before the run was resumed | accuracy {100 * held_out.accuracy:.1f} %")
            self.note(held_out)

    def note(self, held_out: HeldOut) -> None:
        """Take the held-out accuracy of the policy that the trainer holds."""
        step, version = self.progress.step, self.progress.policy_version
        self.best.note(step, version, held_out)
        highest, without_gain = self.best.highest, self.best.without_gain
        self.progress = replace(self.progress, evaluated=version, without_gain=without_gain, highest=highest)
        self.stop_if_flat(step)

    def stop_if_flat(self, step: int) -> None:
        """Make the next step the last one after --stop-when-flat evaluations without a higher accuracy."""
        flat, limit = self.best.without_gain, self.config.stop_when_flat
        if limit and flat >= limit and step + 1 < self.last_step:
            self.progress = replace(self.progress, ends_early_after=step + 1)
            say(f"No better policy in {flat} evaluations: step {step + 1} is the last (--stop-when-flat {limit})")

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        steps = self.config.training_steps
        return min(self.progress.ends_early_after or steps, steps)

    def serve_best_again(self) -> None:
        """Have the best policy evaluated on further questions, as the last one was, if it is another."""
        last, best = self.reported, self.best.to_serve_again
        if best is None or self.config.bridge.owns_vllm:
            return
        version, folder = last.policy_version + 1, self.best.folder(best)
        log.info("Serving the best policy, of version %d, to be asked further questions", best.policy_version)
        self.bridge.sync(version, partial(self.learner.load_weights, str(folder)))
        self.report(replace_struct(last, policy_version=version, weights_of=best.policy_version))
        held_out = self.api.evaluation(version, self.config.eval_deadline)
        if held_out is not None:
            self.best.note_final(best.policy_version, held_out)

    @contextlib.contextmanager
    def failing_once_saved(self) -> Iterator[None]:
        """Keep the error of a peer that is lost once a step is made: it must not cost the checkpoint that is due."""
        try:
            yield
        except (ApiError, BridgeError) as error:
            self._failure = error

    def report(self, report: TrainerStep) -> None:
        """Tell environments what is done and what vLLM serves."""
        self.reported = report
        self.api.report_step(report)

    def keep_trained(self, step: int, batch: Batch, updates: Updates, left_out: str | None) -> None:
        """Write the step's rows of trained.jsonl, if they are asked for."""
        records, self._passed_over = [*self._passed_over, *batch.records], []
        if self.trained_file is not None:
            rows = trained_rows(records, updates.logprobs, step=step, policy_version=step, left_out=left_out)
            self.trained_file.append(step, *rows)

    def chained(self, step: int) -> Mapping[str, str]:
        """Write the groups that the step trained on, and return the digests of its row, if the run can be repeated."""
        if self.batches_file is None:
            return {}
        rows = batch_rows(step, self._items)
        self.batches_file.append(step, *rows)
        before, self._weights = self._weights, self.trained.digest()
        digests = StepDigests.after(self.progress.chain, before, batch_digest(rows), self._weights)
        self.progress = replace(self.progress, chain=digests.chain)
        return digests.columns()

    def keep_receipt(self, *, finished: bool = False) -> None:
        """Write what the run is made of, and what it has made so far."""
        served = self.exactness.served
        told = None if served is None else vars(served)
        write_receipt(self.config, self.progress, self._weights, told, finished=finished)

    def show_samples(self, step: int, batch: Batch) -> None:
        """Give a group's answers to the sinks that people look at, at the first step and every --samples-interval."""
        interval, tokenizer = self.config.samples_interval, self.trained.tokenizer
        if interval and batch.shown and tokenizer and (step == 1 or step % interval == 0):
            for sink in self.metrics:
                sink.write_samples(step, samples_of(batch.shown, tokenizer))

    def is_due(self, step: int) -> bool:
        """Return whether a step ends with a checkpoint."""
        interval = self.config.checkpoint_interval
        return interval > 0 and step % interval == 0

    def save_if_due(self, step: int) -> None:
        """Begin the checkpoint that is due, and acknowledge what the run need not be given again. Raises what has
        failed in this step.
        """
        config = self.config
        if self.is_due(step):
            self.saves.save(self.progress)
        if self._failure is not None:
            raise self._failure
        if self.saves.advance():
            self.best.remove_outdone(self.saves.saved_step if config.checkpoint_interval else step)
        if config.ack_after == "step" or not config.checkpoint_interval:
            self.api.acknowledge()
        else:
            self.api.acknowledge(self.saves.saved_leases)


def keep_weights() -> None:
    """The update of a sync that only hands the weights over as they are."""
