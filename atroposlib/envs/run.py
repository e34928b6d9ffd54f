"""`EnvRun`: one run of an environment, from its construction to its end.

Whatever the framework keeps stands here and not on the environment, whose names are its author's. `BaseEnv` makes one
and its default methods work on it; `serve.py`, `process.py` and the command `evaluate` drive it.

    handle(item) ─▶ env.collect_trajectories ─▶ env.postprocess_histories ─▶ env.handle_send_to_api ─▶ take(groups)
                                                                    checked, kept in files and tables, sent ◀──┘
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from atroposlib.clients.batching_api import ApiRefused
from atroposlib.envs.api_link import ApiLink
from atroposlib.envs.author_errors import MalformedGroup, shown
from atroposlib.envs.environment import Environment, Groups
from atroposlib.envs.errors import GroupTooLargeError, PeerError, Unscored
from atroposlib.envs.metrics import Durations, JsonlSink, Metrics, Sink, length_metrics, open_wandb
from atroposlib.envs.pacing import evaluation_interval
from atroposlib.envs.payloads import (
    Item,
    ScoredDataGroup,
    completion_lengths,
    defect,
    rejection,
    untrainable,
    wire_form,
)
from atroposlib.groups import Needs
from atroposlib.logs import get_logger
from atroposlib.wire.batching import EnvRegistered, EnvRegistration

log = get_logger(__name__)

LENGTHS_KEPT = 10_000
REJECTIONS_REPORTED = 50


async def _start_none() -> None:
    """Outside of `serve` there is no queue to fill."""


class EnvRun:
    """What is known and counted of the run of `env`. An async context: leaving it closes files and connections."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.link: ApiLink | None = None  # with the batching API, under `serve`
        self.start_groups: Callable[[], Awaitable[None]] = _start_none

        # What the API and the trainer said last.
        self.policy_version = 0
        self.total_steps: int = env.config.total_steps
        self.needs = Needs()
        self.registered_name = self.display_name

        # What has been since the start, or since the last log.
        self.counts: Counter[str] = Counter()
        self._rejected_in_row = 0
        self._unscored_in_row = 0
        self.durations = Durations()
        self.eval_results: Metrics = {}

        path = env.config.metrics_path
        self.sinks: list[Sink] = [JsonlSink(Path(path))] if path else []
        self.wandb_is_open = False

    async def __aenter__(self) -> "EnvRun":
        return self

    async def __aexit__(self, *error: object) -> None:
        for sink in self.sinks:
            sink.close()
        if self.env.jsonl_writer is not None:
            self.env.jsonl_writer.close()
        await self.env._release()
        await self.env.server.close()

    @property
    def display_name(self) -> str:
        """How the environment presents itself."""
        return self.env.config.wandb_name or self.env.name or type(self.env).__name__

    # --- one item -------------------------------------------------------------------------------------------------

    async def handle(self, item: Item) -> None:
        """Everything that becomes of `item`, up to the API if there is one. Raises what the author's methods raise."""
        try:
            groups = await self._groups_of(item)
            if groups:
                await self.env.handle_send_to_api(groups, item, do_send_to_api=self.link is not None)
            else:
                self.counts["items_without_group"] += 1
        finally:
            await self.env.cleanup()

    async def _groups_of(self, item: Item) -> Groups:
        """What the author's methods make of `item`; None when its answers could not be scored."""
        try:
            groups, more = await self.env.collect_trajectories(item)
            self.env.backlog.extend(more or [])
            return await self.env.postprocess_histories(groups) if groups else None
        except Unscored as error:
            self._note_unscored(error)
            return None

    def _note_unscored(self, reason: Unscored) -> None:
        """A group was dropped because its answers could not be scored, which costs the error budget nothing."""
        self.counts[reason.count] += 1
        self._unscored_in_row += 1
        log.warning("Dropped a group: %s", reason)
        if self._unscored_in_row % REJECTIONS_REPORTED == 0:
            log.warning(
                "%d groups in a row could not be scored and nothing was sent, the last because %s. The trainer waits "
                "until the policy gives other answers. The scorer's warnings above show these answers; if they are "
                "reasonable, raise its time limit (--env.grader_timeout, --env.scorer_timeout)",
                self._unscored_in_row,
                reason,
            )

    async def take(self, scored_data: Groups, item: Item, send: bool, limit_lengths: bool) -> None:
        """Check groups, keep the good ones in the files and tables, and send them. Waits while the API is away.

        Raises MalformedGroup, once the others are sent, for groups that no trainer could use, that the registered one
        cannot, or that the API refused.
        """
        self._unscored_in_row = 0
        groups = [group for group in (scored_data if isinstance(scored_data, list) else [scored_data]) if group]
        defects = [defect(group) or untrainable(group, self.needs) for group in groups]
        whole = [group for group, found in zip(groups, defects, strict=True) if found is None]
        accepted = [
            await self.env._before_sending(group) for group in whole if self._accept(group, item, limit_lengths)
        ]
        for group in accepted:
            await self.env.add_rollouts_for_wandb(group, item)
            self._remember(group)
        if accepted and send:
            await self._send(accepted)
        if len(whole) < len(groups):
            self.counts["groups_malformed"] += len(groups) - len(whole)
            raise MalformedGroup(
                "a group cannot be trained on: " + "; ".join(found for found in defects if found is not None)
            )

    def _accept(self, group: ScoredDataGroup, item: Item, limit_lengths: bool) -> bool:
        reason = rejection(
            group,
            group_size=self.env.config.group_size,
            max_token_len=self.env.max_token_len if limit_lengths else -1,
            scores_must_differ=self.env.config.ensure_scores_are_not_same,
        )
        if reason is None:
            self._rejected_in_row = 0
            return True
        self.counts["items_rejected"] += 1
        self._rejected_in_row += 1
        log.info("Dropped a group of the item %s: %s", shown(item), reason)
        if self._rejected_in_row % REJECTIONS_REPORTED == 0:
            log.warning(
                "%d groups in a row were dropped and nothing was sent, the last because %s",
                self._rejected_in_row,
                reason,
            )
        return False

    def _remember(self, group: ScoredDataGroup) -> None:
        env = self.env
        self.counts["groups_accepted"] += 1
        lengths = completion_lengths(group)
        env.completion_lengths.extend(lengths)
        del env.completion_lengths[:-LENGTHS_KEPT]
        if env.config.include_messages and not group.get("messages"):
            texts = [env.tokenizer.decode(tokens) for tokens in group["tokens"]]
            group["messages"] = [[{"role": "user", "content": text}] for text in texts]
        if env.jsonl_writer is not None:
            text = (
                {} if group.get("messages") else {"texts": [env.tokenizer.decode(tokens) for tokens in group["tokens"]]}
            )
            extra = {"step": env.curr_step, "policy_version": self.policy_version, "completion_tokens": lengths}
            env.jsonl_writer.write({**extra, **group, **text})

    async def _send(self, groups: list[ScoredDataGroup]) -> None:
        if self.link is None:
            raise RuntimeError("handle_send_to_api without an API: pass do_send_to_api=False, or run `serve`")
        bodies = [wire_form(group, self.link.env_id, self.env.config.include_messages) for group in groups]
        try:
            await self.link.post_groups(bodies)
        except ApiRefused as error:
            if error.status == 401:
                raise PeerError(str(error)) from error
            self.counts["items_refused_by_api"] += len(groups)
            raise MalformedGroup(f"the API refused {len(groups)} group(s): {error}") from error
        self.env.items_sent_this_step += len(groups)

    # --- the API's view -------------------------------------------------------------------------------------------

    @property
    def joined_link(self) -> ApiLink:
        """The link. Raises RuntimeError outside of `serve`."""
        if self.link is None:
            raise RuntimeError("there is no batching API outside of `serve`")
        return self.link

    def announcement(self) -> EnvRegistration:
        """The body of /register-env."""
        config = self.env.config
        return EnvRegistration(
            max_token_length=config.max_token_length,
            desired_name=self.display_name,
            weight=config.inference_weight,
            group_size=config.group_size,
            min_batch_allocation=config.min_batch_allocation,
            steps_per_eval=evaluation_interval(config),
            eval_at_start=config.eval_at_start,
        )

    def note_registration(self, registration: EnvRegistered) -> None:
        """Take over what the API said when this environment joined, and load the checkpoint of a run that goes on."""
        env = self.env
        self.registered_name = registration.wandb_name
        env.wandb_prepend = f"{registration.wandb_name}_"
        env.checkpoint_dir = registration.checkpoint_dir
        env.checkpoint_interval = registration.checkpoint_interval
        limits = [steps for steps in (env.config.total_steps, registration.num_steps) if steps > 0]
        self.total_steps = min(limits, default=1000)
        if env.curr_step == 0 and registration.starting_step > 0:
            env.curr_step = registration.starting_step
            env.load_checkpoint()

    async def read_batch_limits(self) -> None:
        """Read what the trainer's batches take. Raises GroupTooLargeError when a group cannot fit in a batch."""
        config = self.env.config
        config.batch_size, self.env.max_token_len, self.needs = await self.joined_link.batch_limits()
        if 0 < config.batch_size < config.group_size:
            raise GroupTooLargeError(
                f"group_size {config.group_size} is larger than the trainer's batch of {config.batch_size}"
                " sequences: lower --env.group_size, or raise the trainer's batch"
            )

    # --- metrics --------------------------------------------------------------------------------------------------

    async def open_wandb(self) -> None:
        """Open a W&B run if the configuration wants one and the trainer has named a project."""
        config = self.env.config
        if not config.use_wandb or self.link is None:
            return
        group, project = await self.link.wandb_info()
        sink = await open_wandb(self.display_name, group, project, config.model_dump(mode="json"))
        if sink is not None:
            self.sinks.append(sink)
            self.wandb_is_open = True

    async def write_metrics(self, metrics: Metrics) -> None:
        """Write `metrics`, and those of the framework since the last call."""
        env = self.env
        own = await env.create_rollout_table(dict(metrics))
        own |= length_metrics(env.completion_lengths, env.max_token_len)
        own |= env.perf_stats({})
        own |= {"train/items_sent_to_api": env.items_sent_this_step, "policy_version": self.policy_version}
        own |= {f"train/{name}": count for name, count in self.counts.items()}
        prefix = env.wandb_prepend or f"{self.registered_name}_"
        written = await env.server.wandb_metrics({f"{prefix}{key}": value for key, value in own.items()})
        env.completion_lengths = []
        for sink in self.sinks:
            sink.write(written, env.curr_step)


def run_of(env: Environment) -> EnvRun:
    """The run of `env`."""
    run: EnvRun = env._env_run
    return run
