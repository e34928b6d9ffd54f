"""`BaseEnv`: what an environment author extends. How it is run is in `run.py`, `serve.py`, `process.py` and `cli.py`.

item = get_next_item() ──▶ collect_trajectories(item) ──▶ postprocess_histories ──▶ handle_send_to_api ──▶ batching API
                                 │ rollouts, scores                                     │ checked, kept in files
                                 ▼                                                      ▼
                             self.server (inference)                        samples, metrics, W&B

Every public name here is one that environments of the archived ancestor use. All others are free for an author's own
attributes, methods and properties: what the framework keeps stands on `EnvRun`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from msgspec import to_builtins

from atroposlib.envs import checkpoints
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.environment import Groups
from atroposlib.envs.metrics import Metrics
from atroposlib.envs.pacing import batch_share
from atroposlib.envs.payloads import Item, ScoredDataGroup, ScoredDataItem, group_items
from atroposlib.envs.process import process
from atroposlib.envs.records import JsonlWriter, markdown_table, write_eval_results
from atroposlib.envs.run import EnvRun
from atroposlib.envs.serve import serve
from atroposlib.envs.server_handling.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire.batching import EnvStatus

log = get_logger(__name__)

ServerConfigs = ServerBaseline | Sequence[APIServerConfig]


class BaseEnv(ABC):
    """An environment server. Override `get_next_item`, `evaluate`, `collect_trajectory` or `collect_trajectories`,
    mostly `setup` too.
    """

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_cls: ClassVar[type[APIServer]] = APIServer

    def __init__(
        self, config: BaseEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        from atroposlib.envs.server_handling.server_manager import ServerManager  # `--help` does not need its clients

        self.config: Any = config  # of env_config_cls, whatever that is in a subclass
        self.server = ServerManager(
            server_configs,
            server_class=self.server_cls,
            slurm=slurm,
            testing=testing,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        self.tokenizer = load_tokenizer(config.tokenizer_name)
        self.max_num_workers = config.max_num_workers  # groups that may be in flight
        if self.max_num_workers < 0:
            self.max_num_workers = config.max_num_workers_per_node * len(self.server.servers)
        self.process_mode = False

        # What the API and the trainer said last.
        self.curr_step = 0
        self.max_token_len = -1
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.wandb_prepend: str | None = None
        self.status_dict: dict[str, Any] = {}

        # What is going on, and what has been since the last log.
        self.workers: set[Any] = set()
        self.eval_workers: set[Any] = set()
        self.backlog: list[Item] = []
        self.items_sent_this_step = 0
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[list[tuple[Any, ...]]] = []

        path = config.data_path_to_save_groups
        self.jsonl_writer = JsonlWriter(Path(path)) if path else None
        self._env_run = EnvRun(self)

    # --- what an author writes ------------------------------------------------------------------------------------

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerConfigs]:
        """The configuration before YAML and flags: the environment's, and that of one server, a list of them, or a
        ServerBaseline.
        """
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        """Load data; called once, before anything else, when the tokenizer is loaded and the inference server
        answers.
        """
        return

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next thing to sample for, or None when there is nothing now."""

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, Any] | None:
        """Measure the served policy. Return metrics (`accuracy`, 0..1, is the one that trainers read), or pass them to
        `evaluate_log`.
        """

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """One scored sample of `item`, or None to drop the whole group; and items to go on with later."""
        raise NotImplementedError(f"{type(self).__name__} must override collect_trajectory or collect_trajectories")

    async def collect_trajectories(self, item: Item) -> tuple[Groups, list[Item]]:
        """A group of `group_size` scored samples of `item`, or several groups, or None to drop it; and items to go on
        with later.
        """
        results = await gather_or_cancel([self.collect_trajectory(item) for _ in range(self.config.group_size)])
        backlog = [later for _, more in results for later in more or []]
        samples = [sample for sample, _ in results if sample is not None]
        return (group_items(samples) if len(samples) == len(results) else None), backlog

    async def postprocess_histories(self, trajectories: Any) -> Groups:
        """The groups as they are to be sent; None drops them."""
        groups: Groups = trajectories
        return groups

    async def cleanup(self) -> None:
        """Called after every item, whatever became of it."""
        return

    async def _before_sending(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """An accepted group as it is to be kept and sent."""
        return group

    @classmethod
    def _further_servers(cls) -> dict[str, Any]:
        """Inference servers beside `openai`, by their entry in the configuration, before YAML and flags."""
        return {}

    async def _release(self) -> None:
        """Called when a command ends. `close` is the author's own name; `QuestionEnv` calls it here."""
        return

    # --- one item -------------------------------------------------------------------------------------------------

    async def handle_env(self, item: Item) -> None:
        """Everything that becomes of `item`, up to the API. Raises what the author's methods raise."""
        await self._env_run.handle(item)

    async def handle_send_to_api(
        self,
        scored_data: Groups,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Check groups, keep the good ones in the files and tables, and send them; see `EnvRun.take`."""
        await self._env_run.take(scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded)

    # --- the API's view -------------------------------------------------------------------------------------------

    @property
    def derived_batch_size(self) -> int:
        """Sequences of each batch that this environment may fill."""
        fraction = self.status_dict.get("unallocated_fraction", 1.0)
        return batch_share(self.config.batch_size, fraction, self.config.min_batch_allocation)

    async def register_env(self) -> None:
        """Join the API, once a trainer has started."""
        await self._env_run.joined_link.join()

    async def get_server_info(self) -> None:
        """Read what the trainer's batches take. Raises GroupTooLargeError when a group cannot fit in a batch."""
        await self._env_run.read_batch_limits()

    async def get_status(self) -> EnvStatus:
        """Ask the API where things are, and note it."""
        status = await self._env_run.joined_link.status()
        self.status_dict = to_builtins(status)
        return status

    async def env_step_checks(self) -> None:
        """Called when the trainer has moved on, to `status_dict["current_step"]`: take that over, write the figures of
        the step.
        """
        self.curr_step = self.status_dict["current_step"]
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            await self.wandb_log({})
            self.items_sent_this_step = 0

    # --- metrics --------------------------------------------------------------------------------------------------

    async def setup_wandb(self) -> None:
        """Open a W&B run if the configuration wants one and the trainer has named a project."""
        await self._env_run.open_wandb()

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None:
        """Write `wandb_metrics` and those of the framework since the last call. An override adds its own and calls
        this.
        """
        await self._env_run.write_metrics(wandb_metrics or {})

    def perf_stats(self, metrics: Metrics) -> Metrics:
        """`metrics` with the durations of items since the last call."""
        return metrics | {f"train_perf/{key}": value for key, value in self._env_run.durations.take().items()}

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item = None) -> None:
        """Keep some samples of a group, as (text, score), for the rollout table."""
        if not self._env_run.wandb_is_open or self.config.num_rollouts_to_keep == 0:
            return
        wanted = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["tokens"]) if wanted < 0 else wanted
        texts = [self.tokenizer.decode(tokens) for tokens in scored_data["tokens"][:count]]
        self.rollouts_for_wandb.append(list(zip(texts, scored_data["scores"], strict=False)))
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def create_rollout_table(self, wandb_metrics: Metrics) -> Metrics:
        """`wandb_metrics` with the kept samples as a table."""
        if not self._env_run.wandb_is_open or not self.rollouts_for_wandb:
            return wandb_metrics
        import wandb

        table = wandb.Table(columns=["text", "score"])
        for group in self.rollouts_for_wandb:
            for row in group:
                table.add_data(*row[:2])
        self.rollouts_for_wandb = []
        return wandb_metrics | {"train/rollouts": table}

    async def evaluate_log(
        self,
        metrics: Metrics,
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Note an evaluation's `metrics`; with data_dir_to_save_evals write them and the samples there. Times are
        seconds.
        """
        self._env_run.eval_results = dict(metrics)
        if verbose:
            print(markdown_table(metrics), flush=True)
        if self.config.data_dir_to_save_evals is None:
            log.warning("The evaluation is not written to files: data_dir_to_save_evals is not set")
            return
        write_eval_results(
            Path(self.config.data_dir_to_save_evals),
            task_name or f"{self._env_run.display_name}_eval",
            metrics,
            samples,
            model_name=model_name or self.server.model_name,
            start_time=start_time,
            end_time=end_time,
            generation_parameters=generation_parameters,
        )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Called at the trainer's checkpoint steps. An override passes `data`: attributes that a resumed run sets
        again.
        """
        if data is not None:
            checkpoints.save(self.checkpoint_dir, self._env_run.registered_name, step, data)

    def load_checkpoint(self) -> None:
        """Set the attributes that the last whole checkpoint at or before `self.curr_step` holds, if there is one."""
        run, folder, step = self._env_run, self.checkpoint_dir, self.curr_step
        found = checkpoints.load(folder, run.registered_name, run.display_name, step)
        if found is None:
            log.info("No checkpoint of %s up to step %d in %r: starting afresh", run.display_name, step, folder)
            return
        path, attributes = found
        for name, value in attributes.items():
            setattr(self, name, value)
        log.info("Loaded %s", path)

    # --- running --------------------------------------------------------------------------------------------------

    async def add_train_workers(self) -> None:
        """Called ten times a second: start what the queue policy allows. An override may do nothing, and send groups
        by itself.
        """
        await self._env_run.start_groups()

    async def env_manager(self) -> None:
        """Serve until the last step; see `serve.py`."""
        await serve(self)

    async def process_manager(self) -> None:
        """Sample `total_steps` groups into files, without an API; see `process.py`."""
        await process(self)

    @classmethod
    def cli(cls, argv: Sequence[str] | None = None, default_command: str | None = None) -> None:
        """Run the command line `serve | process | evaluate`; `default_command` is taken when none is named."""
        from atroposlib.envs.cli import main

        main(cls, argv, default_command)
