"""The settings of an environment: `BaseEnvConfig`, which every environment's own configuration extends."""

from enum import Enum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from atroposlib.config import InputPathText, Name, OutputFileText, absent_inputs
from atroposlib.envs.server_handling.reasoning import Effort
from atroposlib.row_files.kept_rows import DEFAULT, KeepText

LACKS = "It would not start: "  # begins the lines of `serve --dry-run` that tell
# Fields by these names are sampling parameters; others in `groups.NEUTRAL` have names that mean much else.
PARAMETERS = {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"}


class EvalHandlingEnum(Enum):
    """What happens to the sampling of training data while an evaluation runs: nothing new, less of it, or no change."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(BaseModel):
    """Every environment.

    Unknown keys given to the constructor are ignored; on the command line and in YAML they are errors (`cli.py`).
    """

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    group_size: int = Field(default=4, ge=1, description="Samples of one item that are scored together.")
    max_num_workers: int = Field(
        default=-1, description="Groups in flight; -1 means max_num_workers_per_node times the number of servers."
    )
    max_eval_workers: int = Field(
        default=16, ge=1, description="Evaluation items in flight, for environments that limit them."
    )
    max_num_workers_per_node: int = Field(default=8, ge=1, description="Groups in flight per inference server.")
    steps_per_eval: int = Field(
        default=100, description="Policy versions between evaluations; 0 or less disables evaluation."
    )
    eval_at_start: bool = Field(
        default=False, description="Also evaluate policy version 0, before training data is sampled."
    )
    max_token_length: int = Field(
        default=2048,
        description="Most tokens of a conversation of several turns, where given; the API weights environments by it.",
    )
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.STOP_TRAIN, description="Whether training data is sampled while evaluating."
    )
    eval_limit_ratio: float = Field(
        default=0.5, ge=0, le=1, description="Share of workers that keep sampling under eval_handling LIMIT_TRAIN."
    )
    inference_weight: float = Field(
        default=1.0, description="Weight of this environment's share of the inference servers."
    )
    batch_size: int = Field(default=-1, description="Rollouts per batch; overridden by the API's number.")
    max_batches_offpolicy: int = Field(
        default=3,
        ge=0,
        description=(
            "Limit of batches in flight and queued; 0 also waits until the delivered batch is trained (on-policy)."
        ),
    )
    deterministic: bool = Field(
        default=False,
        description=(
            "Sample the same groups in every run of this seed, whatever is killed meanwhile: with max_batches_offpolicy"
            " 0, and servers that are batch-invariant."
        ),
    )
    tokenizer_name: str = Field(
        default="NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        description=("Directory or hub name of the tokenizer; 'default' means the tokenizer of the served model."),
    )
    chat_template: InputPathText | None = Field(
        default=None,
        description="Jinja file with which conversations become prompts, such as for a base model; default: the"
        " tokenizer's.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description='Arguments of the chat template as JSON, such as {"enable_thinking": false}.'
    )
    use_wandb: bool = Field(default=True, description="Log to Weights & Biases if the trainer names a project.")
    rollout_server_url: str = Field(default="http://localhost:8000", description="Address of the batching API.")
    rollout_server_token: SecretStr | None = Field(
        default=None, description="Token of the batching API.", json_schema_extra={"env": "ATROPOS_API_TOKEN"}
    )
    total_steps: int = Field(
        default=1000,
        description="Steps after which the environment ends; -1, or more than the trainer has: when the trainer ends.",
    )
    wandb_name: Name | None = Field(default=None, description="Name of this environment; default: its class's name.")
    num_rollouts_to_keep: int = Field(default=32, ge=0, description="Groups to keep for the rollout table.")
    num_rollouts_per_group_for_logging: int = Field(
        default=1, description="Samples of each kept group in the table; -1 means all."
    )
    ensure_scores_are_not_same: bool = Field(
        default=True, description="Drop groups whose scores are all equal, and sample others instead."
    )
    max_items_per_batch: int = Field(
        default=0,
        ge=0,
        description=(
            "With ensure_scores_are_not_same: limit of groups to sample for one batch; beyond it, groups of equal"
            " scores fill the batch, oldest first. 0: no limit."
        ),
    )
    data_path_to_save_groups: OutputFileText | None = Field(
        default=None,
        description=("JSONL file, one line per group; serve also writes dropped groups. An existing file is kept."),
    )
    keep_samples: KeepText = Field(
        default=DEFAULT,
        description=(
            "How much of that file serve keeps: bytes (20GB), steps (200steps) or all. Older parts are compressed, and"
            " then removed."
        ),
    )
    data_dir_to_save_evals: str | None = Field(default=None, description="Directory for the results of evaluations.")
    evaluations_path: OutputFileText | None = Field(
        default=None, description="JSONL file, one line per evaluation; by default in the directory for evaluations."
    )
    held_out_path: OutputFileText | None = Field(
        default=None, description="JSONL file, one line per answer of an evaluation."
    )
    run_record_path: OutputFileText | None = Field(
        default=None, description="JSON file of the run, to which the look at the data is added as `data`."
    )
    metrics_path: OutputFileText | None = Field(default=None, description="JSONL file, one line of metrics per step.")
    min_items_sent_before_logging: int = Field(
        default=2, description="Groups sent before metrics are logged; 0 or less: every step."
    )
    include_messages: bool = Field(default=False, description="Also send the messages to the API, with the tokens.")
    min_batch_allocation: float | None = Field(
        default=None, ge=0, le=1, description="Smallest share of every batch that comes from this environment."
    )
    rollout_timeout: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description=(
            "Seconds that one rollout may take before it fails and its siblings continue; waiting for a server does "
            "not count. 0 or less: no limit. Default: worker_timeout."
        ),
    )
    worker_timeout: float = Field(default=600, description="Former name of rollout_timeout, in seconds.")
    max_failed_items: int = Field(
        default=32,
        ge=0,
        description=(
            "How many of the last 100 items may fail in the environment's own code before the server ends; 100: any "
            "number."
        ),
    )
    max_fruitless_items: int = Field(
        default=100, ge=0, description="Items in a row without a group after which process ends; 0: no limit."
    )
    startup_timeout: float = Field(
        default=1800, gt=0, description="Seconds to wait for each peer: API, trainer, inference server."
    )
    thinking_mode: bool = Field(default=False, description="Ask the model to reason before it answers.")
    reasoning_effort: Effort | None = Field(default=None, description="Reasoning effort; implies thinking_mode.")
    max_reasoning_tokens: int | None = Field(
        default=None, ge=1024, le=32000, description="Limit of reasoning tokens; implies thinking_mode."
    )
    custom_thinking_prompt: str | None = Field(
        default=None, description="System prompt that replaces the built-in one of thinking_mode."
    )

    def lacks(self) -> list[str]:
        """Tell what the environment could not start without, as far as a look at this machine tells. `serve --dry-run`
        notes it, and `atropos train` refuses it before vLLM starts. An environment adds what it needs besides files.
        """
        return absent_inputs(self, "env.")

    @property
    def rollout_limit_s(self) -> float:
        """Seconds one rollout may take; 0 or less: any time."""
        return self.worker_timeout if self.rollout_timeout is None else self.rollout_timeout

    @model_validator(mode="after")
    def _can_be_repeated(self) -> Self:
        if not self.deterministic:
            return self
        if self.max_batches_offpolicy:
            raise ValueError(
                f"deterministic: max_batches_offpolicy {self.max_batches_offpolicy} samples from whichever policy is"
                " served by then; give 0"
            )
        if self.ensure_scores_are_not_same and not self.max_items_per_batch:
            raise ValueError(
                "deterministic: with ensure_scores_are_not_same, max_items_per_batch has to limit the groups that are"
                " sampled for a batch; give it, or ensure_scores_are_not_same false"
            )
        return self

    @model_validator(mode="after")
    def _samples_what_the_trainer_replays(self) -> Self:
        """A field of an author's configuration that has the name of a sampling parameter is taken for one."""
        from atroposlib.groups import NOT_REPLAYED, not_replayed  # numpy, which --help does without

        for name in not_replayed({name: getattr(self, name) for name in PARAMETERS & type(self).model_fields.keys()}):
            raise ValueError(f"{name} {getattr(self, name)} {NOT_REPLAYED}; what only evaluations use: eval_{name}")
        return self
